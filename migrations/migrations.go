// Package migrations holds the goose SQL files that create schema fence.
//
// Apply them with `fencecheck migrate up`, which keeps their history in the table fence.goose_db_version and so never
// meets the history of your own migrations; or print them with `fencecheck migrate sql` and fold them into your own
// set; or hand [FS] to a goose Provider of yours.
//
// A file that has been released never changes. Every file ends by replacing fence.schema_version(), which is how a
// program that uses the schema learns which one it meets, whoever applied it.
package migrations

import (
	"embed"
	"io/fs"
)

//go:embed *.sql
var files embed.FS

// FS holds the migrations in its root, named as goose wants them: 00001_leases.sql and so on.
var FS fs.FS = files

// Version is what fence.schema_version() returns once all of [FS] has been applied.
const Version = 7
