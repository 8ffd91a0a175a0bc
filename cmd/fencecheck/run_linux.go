package main

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// dieWithUs has the kernel kill the command when fencecheck dies, however it does.
func dieWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// onlyZombies reports whether all processes of a group have ended. Those whose parent does not ask for their status, as the
// first process of a container may not, can still be signalled.
func onlyZombies(group int) bool {
	proc, err := os.Open("/proc")
	if err != nil {
		return false
	}
	defer func() { _ = proc.Close() }()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return false
	}
	seen := false
	for _, name := range names {
		if _, err := strconv.Atoi(name); err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // has ended meanwhile
		}
		// pid (name) state parent group …, and the name may have anything in it.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 3 || string(fields[2]) != strconv.Itoa(group) {
			continue
		}
		if state := fields[0][0]; state != 'Z' && state != 'X' {
			return false
		}
		seen = true
	}
	return seen // or the system hides them
}
