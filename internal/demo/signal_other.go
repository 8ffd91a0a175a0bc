//go:build !unix

package demo

import "errors"

var errNoSignals = errors.New("the demo stops a process and resumes it, which needs a Unix")

func (p *process) suspend() error { return errNoSignals }
func (p *process) resume() error  { return errNoSignals }
