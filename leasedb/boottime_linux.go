package leasedb

import (
	"syscall"
	"time"
	"unsafe"
)

const clockBoottime = 7 // CLOCK_BOOTTIME, from clock_gettime(2); golang.org/x/sys has it, and is not worth a dependency

func bootTime() time.Duration {
	var ts syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0 // kernels before 2.6.39, some sandboxes: the other clocks must do
	}
	return time.Duration(ts.Nano())
}
