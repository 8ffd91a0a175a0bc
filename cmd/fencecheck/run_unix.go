//go:build unix

package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// passedOn are the signals that the command gets when we do. SIGPIPE is not: it is caught because the default would end us,
// and with us the command, when the lease's loss is told to a stderr that nobody reads any more.
var passedOn = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
	syscall.SIGALRM, syscall.SIGCONT, syscall.SIGTSTP, syscall.SIGWINCH,
}

// bornIgnoring is what nohup, or the & of a shell without job control, has asked to be spared. It is looked at before main
// catches signals.
var bornIgnoring = func() (ignored []os.Signal) {
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			ignored = append(ignored, sig)
		}
	}
	return ignored
}()

func catchSignals(c chan<- os.Signal) {
	signal.Notify(c, append(passedOn, syscall.SIGPIPE)...)
	if len(bornIgnoring) > 0 {
		signal.Ignore(bornIgnoring...) // which the command inherits
	}
}

func endsWaiting(sig os.Signal) bool {
	switch sig {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT:
		return true
	}
	return false
}

func stops(sig os.Signal) bool { return sig == syscall.SIGTSTP }

func signalNumber(sig os.Signal) int { return int(sig.(syscall.Signal)) }

// stopSelf does what an uncaught SIGTSTP would.
func stopSelf() {
	if !orphaned() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	}
}

// orphaned reports whether nobody is there to continue us once we have stopped: our parent is not of our session.
func orphaned() bool {
	parent, err := unix.Getsid(os.Getppid())
	if err != nil {
		return true
	}
	own, err := unix.Getsid(0)
	return err != nil || own != parent
}

// event is a change of the command's.
type event struct {
	ended  bool
	status int            // if it has ended
	signal syscall.Signal // that has stopped it, if it has not
}

// group is the command and all that it has started, but for what has left its process group.
type group struct {
	cmd    *exec.Cmd
	id     int // 0 until it has been started
	events chan event

	tty int // the controlling terminal, or -1
	own int // our process group
	// interactive says that the terminal is the command's whenever it would be ours.
	interactive bool
	// stopAsked says that we got a SIGTSTP, as the rest of our own group did, and have not stopped for it yet.
	stopAsked bool
}

// startGroup starts the command in a process group of its own: a signal then reaches what it has started as well, and only
// that. To be able to read from the terminal, that group has to be the terminal's foreground.
func startGroup(cmd *exec.Cmd) (*group, error) {
	own, err := unix.Getpgid(0)
	if err != nil {
		return nil, err
	}
	g := &group{cmd: cmd, events: make(chan event), own: own, tty: -1}
	if fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0); err == nil {
		g.tty = fd
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// At the beginning or in the middle of a pipeline others may want the terminal, a pager for one. Then the command gets
	// it once it asks: see suspended.
	g.interactive = g.tty >= 0 && isTerminal(cmd.Stdin) && isTerminal(cmd.Stdout)
	if g.interactive && g.foreground() == g.own {
		cmd.SysProcAttr.Foreground, cmd.SysProcAttr.Ctty = true, g.tty
	}
	dieWithUs(cmd.SysProcAttr)

	started := make(chan error)
	go func() {
		// The death of this thread, not of the process, is what the kernel tells the command of. Never unlocked.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			g.watch()
		}
	}()
	if err := <-started; err != nil {
		g.close()
		return nil, err
	}
	g.id = cmd.Process.Pid
	if g.tty >= 0 {
		signal.Ignore(syscall.SIGTTOU) // from now on we speak, and take the terminal back, from the background
	}
	return g, nil
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// watch reports what becomes of the command. exec.Cmd cannot: it does not see a stop.
func (g *group) watch() {
	for {
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(g.cmd.Process.Pid, &ws, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // nobody else waits for it
			g.events <- event{ended: true, status: exitCannotRun}
			return
		case ws.Exited():
			g.events <- event{ended: true, status: ws.ExitStatus()}
			return
		case ws.Signaled():
			g.events <- event{ended: true, status: exitSignalled + int(ws.Signal())}
			return
		case ws.Stopped():
			g.events <- event{signal: ws.StopSignal()}
		}
	}
}

// pass hands on a signal that we got.
func (g *group) pass(sig os.Signal) {
	switch sig {
	case syscall.SIGPIPE:
		return
	case syscall.SIGCONT:
		if g.interactive && g.foreground() == g.own { // fg
			g.setForeground(g.id)
		}
	case syscall.SIGTSTP:
		g.stopAsked = true
	}
	_ = syscall.Kill(-g.id, sig.(syscall.Signal))
}

// terminate asks the group to end. What is stopped has to go on to be able to.
func (g *group) terminate() {
	_ = syscall.Kill(-g.id, syscall.SIGTERM)
	_ = syscall.Kill(-g.id, syscall.SIGCONT)
}

func (g *group) kill() { _ = syscall.Kill(-g.id, syscall.SIGKILL) }

// alive reports whether anything of the group is left. While it is, the system gives the group's id to nobody else.
func (g *group) alive() bool {
	return !errors.Is(syscall.Kill(-g.id, 0), syscall.ESRCH) && !onlyZombies(g.id)
}

// suspended deals with the command's stopping where there is a terminal; elsewhere that is between it and whoever stopped it.
func (g *group) suspended(e event) {
	if g.tty < 0 {
		return
	}
	switch e.signal {
	case syscall.SIGTTIN, syscall.SIGTTOU:
		// It asks for a terminal that is ours to give. A SIGTSTP that came meanwhile would be undone by the SIGCONT.
		if g.foreground() == g.own && !g.stopAsked {
			g.interactive = true
			g.setForeground(g.id)
			_ = syscall.Kill(-g.id, syscall.SIGCONT)
			return
		}
	case syscall.SIGTSTP:
	default:
		return
	}
	g.stopAsked = false
	if orphaned() { // the system would not have stopped it
		_ = syscall.Kill(-g.id, syscall.SIGCONT)
		return
	}
	// The shell sees its job stop, and takes over. Nothing is renewed meanwhile. SIGCONT continues: see pass.
	if g.foreground() == g.id {
		g.setForeground(g.own)
	}
	_ = syscall.Kill(0, syscall.SIGSTOP)
}

// foreground returns the process group that the terminal listens to.
func (g *group) foreground() int {
	id, err := unix.IoctlGetInt(g.tty, unix.TIOCGPGRP)
	if err != nil {
		return -1
	}
	return id
}

func (g *group) setForeground(id int) { _ = unix.IoctlSetPointerInt(g.tty, unix.TIOCSPGRP, id) }

// close takes the terminal back, if it is not another's by now. The group has ended.
func (g *group) close() {
	if g.id != 0 {
		g.cmd.WaitDelay = time.Second
		_ = g.cmd.Wait() // of use where its streams are no files, and are copied
	}
	if g.tty < 0 {
		return
	}
	signal.Ignore(syscall.SIGTTOU)
	// Of a command that could not be executed the group's id is not known.
	if g.foreground() == g.id || g.id == 0 && g.cmd.SysProcAttr.Foreground {
		g.setForeground(g.own)
	}
	signal.Reset(syscall.SIGTTOU)
	_ = unix.Close(g.tty)
}
