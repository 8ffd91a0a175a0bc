//go:build unix

package demo

import (
	"fmt"
	"io"
	"syscall"
)

func (p *process) suspend() error {
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("SIGSTOP to %s: %w", p.holder, err)
	}
	return nil
}

func (p *process) resume() error {
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return fmt.Errorf("SIGCONT to %s: %w", p.holder, err)
	}
	_, err := io.WriteString(p.in, "go\n")
	return err
}
