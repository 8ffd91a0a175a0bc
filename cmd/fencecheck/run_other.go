//go:build !unix

package main

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// catchSignals catches Ctrl-C, which every program at the console gets by itself: we stay until the command has ended.
func catchSignals(c chan<- os.Signal) { signal.Notify(c, os.Interrupt, syscall.SIGTERM) }

func endsWaiting(os.Signal) bool { return true }

func stops(os.Signal) bool { return false }

func stopSelf() {}

func signalNumber(sig os.Signal) int {
	if n, ok := sig.(syscall.Signal); ok {
		return int(n)
	}
	return 0
}

type event struct {
	ended  bool
	status int
}

// group is the command alone: there are no process groups here, and nothing that asks a program to end.
type group struct {
	cmd    *exec.Cmd
	events chan event
}

func startGroup(cmd *exec.Cmd) (*group, error) {
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	g := &group{cmd: cmd, events: make(chan event, 1)}
	go func() {
		_ = cmd.Wait()
		g.events <- event{ended: true, status: cmd.ProcessState.ExitCode()}
	}()
	return g, nil
}

func (g *group) pass(os.Signal) {}

func (g *group) terminate() { g.kill() }

func (g *group) kill() { _ = g.cmd.Process.Kill() }

func (g *group) alive() bool { return false }

func (g *group) suspended(event) {}

func (g *group) close() {}
