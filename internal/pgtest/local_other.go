//go:build !unix

package pgtest

import (
	"context"
	"errors"
)

var errNoBinaries = errors.New("a throw-away server from installed binaries needs a Unix")

func startLocal(context.Context, ...string) (*Server, error) {
	return nil, errNoBinaries
}

// files says where a local server lives: here there are none.
type files struct{}
