package demo

import "syscall"

// dieWithUs has the kernel end a worker whose parent has been killed: one that is stopped could not notice by itself.
func dieWithUs() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
