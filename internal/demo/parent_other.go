//go:build !linux

package demo

import "syscall"

// dieWithUs: here a worker notices that its parent has gone when it next speaks to it.
func dieWithUs() *syscall.SysProcAttr { return nil }
