package fencedb

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Lease is what a gate asks of the grant that a write is made under. *leasedb.Lease is one; [Static] and [Callback]
// make one of a fence that comes from elsewhere.
type Lease interface {
	// Name is the lease's name, for the audit.
	Name() string
	// Fence is the grant's fence; 0 or less is refused.
	Fence() int64
	// Token is the uuid that proves the grant to the database; "" if there is none, and then Live and InTx cannot be used.
	Token() string
	// Holder is a label for people.
	Holder() string
	// Check returns an error if the holder itself knows that the lease is over, or has less than need left. It is asked
	// before anything is sent, and must not wait.
	Check(need time.Duration) error
}

// What a Lease may offer beside that. *leasedb.Lease has all of it.
type (
	// loser wants to hear that the database has found it over.
	loser interface{ Lose(cause error) }
	// ender has a context that ends with it, which then ends what is under way in InTx.
	ender interface{ Context() context.Context }
	// keeper knows how much time it has left, for the signals.
	keeper interface{ Remaining() time.Duration }
)

// Static returns a Lease with a fence of which nothing more is known: one that was handed to this process, or that
// comes from another lock service (an etcd revision, a Redis counter), whose numbers only ever grow. It passes every
// check of its own, so all that stands between it and the row is the fence. It has no token, so it cannot be used with
// [Live] and [InTx]; and whether a number is free below the fence is unknown, so it cannot [Table.Seal]: see [Doubled].
func Static(name string, fence int64, holder string) Lease {
	return Callback(name, holder, func() (int64, error) { return fence, nil })
}

// Callback returns a Lease as [Static] does, whose fence is asked for anew for every write. An error refuses the write
// as [LeaseLost] before anything is sent. fence must not wait for long, and be safe for concurrent use.
func Callback(name, holder string, fence func() (int64, error)) Lease {
	return callback{name, holder, fence}
}

type callback struct {
	name, holder string
	fence        func() (int64, error)
}

func (c callback) Name() string              { return c.name }
func (c callback) Token() string             { return "" }
func (c callback) Holder() string            { return c.holder }
func (c callback) Check(time.Duration) error { return nil }
func (c callback) Fence() int64 {
	fence, err := c.fence()
	if err != nil {
		return 0
	}
	return fence
}

// Doubled returns lease with twice its fence, which leaves a number free below each for [Table.Seal]. Fences of leasedb
// are even already; double those from elsewhere, in every program that writes the table, or in none.
func Doubled(lease Lease) Lease { return doubled{lease} }

type doubled struct{ Lease }

func (d doubled) Fence() int64 { return 2 * d.Lease.Fence() }

// noted is a lease of which it has been taken down already what it was.
type noted struct {
	Lease
	grant grant
}

// handle is the lease behind one that was taken down, or doubled.
func handle(lease Lease) Lease {
	if t, ok := lease.(noted); ok {
		lease = t.Lease
	}
	if d, ok := lease.(doubled); ok {
		return d.Lease
	}
	return lease
}

// grant is what a write keeps of its lease: the same from beginning to end, whatever becomes of the handle.
type grant struct {
	lease               Lease
	name, token, holder string
	fence               int64
	even                bool // there is a number free below the fence
}

// claim is how a transaction says whose it is.
func (g *grant) claim() string {
	return plainToken(g.token) + ":" + strconv.FormatInt(g.fence, 10) + ":" + g.name
}

// plainToken writes a token as the database does: it takes it in other forms too, and compares what is claimed as text.
func plainToken(token string) string {
	plain := len(token) == 36 && strings.Trim(token, "0123456789abcdef-") == ""
	var id pgtype.UUID
	if plain || id.Scan(strings.Trim(token, "{}")) != nil {
		return token
	}
	return id.String()
}

// grantOf takes down what lease is now. The error says why nothing can be written under it.
func grantOf(lease Lease) (grant, error) {
	if lease == nil {
		return grant{}, errors.New("no lease was given")
	}
	if t, ok := lease.(noted); ok {
		return t.grant, nil
	}
	g := grant{lease: lease, name: lease.Name(), token: lease.Token(), holder: lease.Holder()}
	source, scale := handle(lease), int64(1)
	if _, twice := lease.(doubled); twice {
		scale = 2
	}
	if c, ok := source.(callback); ok {
		fence, err := c.fence()
		if err != nil {
			return g, fmt.Errorf("its fence could not be learned: %w", err)
		}
		g.fence = fence
	} else {
		g.fence = source.Fence()
	}
	if g.fence > math.MaxInt64/scale {
		return g, fmt.Errorf("fence %d cannot be doubled", g.fence)
	}
	g.fence *= scale
	if len(g.name) > 255 {
		return g, fmt.Errorf("its name has %d bytes: want at most 255", len(g.name))
	}
	g.even = scale == 2 || g.token != ""
	if err := lease.Check(0); err != nil {
		return g, err
	}
	if g.fence <= 0 {
		return g, errors.New("a fence of 0 or less was never granted")
	}
	return g, nil
}
