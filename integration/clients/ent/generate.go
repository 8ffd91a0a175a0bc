// Package ent is what ent makes of its schema; only that, and this, are written by hand.
package ent

//go:generate go tool ent generate ./schema
