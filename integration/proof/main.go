//go:build unix

// Proof runs writegate as Jepsen would: worker processes take leases and write under them, while whatever can break is
// broken on purpose, and what they were told is held against what the database says happened. Then it does the same with
// broken variants of writegate, and each has to be caught.
//
//	go run ./integration/proof          short: under three minutes
//	go run ./integration/proof -long    a million writes and a thousand faults
//
// It ends with one line of JSON, and with status 1 if anything was violated, or a control was not caught.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/writegate/writegate/internal/pgtest"
)

// run is one run of the proof. It stands in for a test where pgtest wants one.
type run struct {
	testing.TB
	ctx      context.Context
	dir      string
	cleanups []func()
}

type fatal struct{ what string }

func (r *run) Helper()                      {}
func (r *run) Cleanup(f func())             { r.cleanups = append(r.cleanups, f) }
func (r *run) Errorf(f string, args ...any) { r.say("error: "+f, args...) }
func (r *run) Fatalf(f string, args ...any) { panic(fatal{where() + fmt.Sprintf(f, args...)}) }
func (r *run) Skipf(f string, args ...any)  { panic(fatal{fmt.Sprintf(f, args...)}) }
func (r *run) Skip(args ...any)             { panic(fatal{fmt.Sprint(args...)}) }
func (r *run) say(f string, args ...any)    { fmt.Fprintf(os.Stderr, f+"\n", args...) }
func (r *run) Logf(format string, a ...any) { r.say(format, a...) }
func (r *run) must(err error) {
	if err != nil {
		_, file, line, _ := runtime.Caller(1)
		panic(fatal{fmt.Sprintf("%s:%d: %v", filepath.Base(file), line, err)})
	}
}

// caught is the error of what Fatalf has ended, and err where nothing was; whatever else was recovered goes on.
func caught(recovered any, err error) error {
	switch p := recovered.(type) {
	case nil:
		return err
	case fatal:
		return errors.New(p.what)
	default:
		panic(p)
	}
}

// where says which line of ours has come to its end, perhaps in a package below.
func where() string {
	for skip := 2; ; skip++ {
		_, file, line, ok := runtime.Caller(skip)
		switch {
		case !ok:
			return ""
		case filepath.Base(filepath.Dir(file)) == "proof":
			return fmt.Sprintf("%s:%d: ", filepath.Base(file), line)
		}
	}
}

func (r *run) end() {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
	r.cleanups = nil
}

// scope runs a part that cleans up after itself.
func (r *run) scope(part func(*run)) {
	inner := *r
	inner.cleanups = nil
	defer inner.end()
	part(&inner)
}

// result is what is printed last.
type result struct {
	Seed       uint64  `json:"seed"`
	Writes     int     `json:"writes"`
	Faults     int     `json:"faults"`
	Violations int     `json:"violations"`
	Controls   int     `json:"controls"`
	Caught     int     `json:"controls_caught"`
	Seconds    float64 `json:"seconds"`
}

// add counts a round, and says what came of it; besides is about its grants.
func (out *result) add(r *round, c *checker, what, besides string) {
	out.Writes += c.h.attempted()
	out.Faults += r.faults
	out.Violations += len(c.found)
	r.t.say("%s: %d writes, of which %d were applied, %d grants%s, %d faults %v, %d violations", what, c.h.attempted(), len(c.l.writes), c.l.grants(), besides,
		r.faults, r.kinds, len(c.found))
}

type settings struct {
	long     bool
	seed     uint64
	writes   int
	faults   int
	controls string
	parts    string
	kind     string
	keep     string
}

func main() {
	if text := os.Getenv(envOrders); text != "" {
		if err := workerMain(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if target := os.Getenv(envProxy); target != "" {
		fmt.Fprintln(os.Stderr, proxyMain(target))
		os.Exit(1)
	}
	var s settings
	flag.BoolVar(&s.long, "long", false, "go on until there were -writes writes and -faults faults")
	flag.Uint64Var(&s.seed, "seed", uint64(time.Now().UnixNano())%1e9, "what chance begins with; printed, to run it again")
	flag.IntVar(&s.writes, "writes", 1_000_000, "of a long run")
	flag.IntVar(&s.faults, "faults", 1_000, "of a long run")
	flag.StringVar(&s.controls, "controls", "", "only controls whose name contains this")
	flag.StringVar(&s.parts, "parts", "campaign,failover,controls", "what to do")
	flag.StringVar(&s.kind, "failover", "", "only the kind of failover whose name contains this")
	flag.StringVar(&s.keep, "keep", "", "directory for histories of what was violated; default: a temporary one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	out, err := prove(ctx, s)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "proof:", err)
	}
	text, _ := json.Marshal(out)
	fmt.Println(string(text))
	if err != nil || out.Violations > 0 || out.Caught < out.Controls {
		os.Exit(1)
	}
}

// check finds out before anything is done what cannot be done.
func (s settings) check() error {
	known := []string{"campaign", "failover", "patroni", "hosts", "controls"}
	needs := map[string][]string{"campaign": {"pgbouncer"}, "patroni": {"patroni", "etcd"}, "hosts": {"docker"}}
	for _, part := range strings.Split(s.parts, ",") {
		if !slices.Contains(known, part) {
			return fmt.Errorf("part %q: want some of %s", part, strings.Join(known, ","))
		}
		for _, program := range needs[part] {
			find := func() (string, error) { return exec.LookPath(program) }
			if program == "pgbouncer" {
				find = pgtest.PoolerProgram
			}
			if _, err := find(); err != nil {
				return fmt.Errorf("part %q needs %s, which is not installed (in Debian: packages pgbouncer, docker.io, patroni, etcd-server)", part, program)
			}
		}
	}
	if !slices.ContainsFunc(controls, func(c control) bool { return strings.Contains(c.name, s.controls) }) {
		return fmt.Errorf("no control has %q in its name", s.controls)
	}
	return nil
}

// undertake ends workers that outlive us, which those do that were stopped when we were killed.
func (r *run) undertake() {
	r.Helper()
	r.must(os.MkdirAll(filepath.Join(r.dir, "pids"), 0o700))
	cmd := exec.Command("/bin/sh", "-c", `cat >/dev/null; for f in "$0"/pids/*; do [ -e "$f" ] && kill -KILL "$(cat "$f")" 2>/dev/null; done`, r.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	r.must(err)
	r.must(cmd.Start())
	r.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
}

func prove(ctx context.Context, s settings) (out result, err error) {
	began := time.Now()
	out.Seed = s.seed
	r := &run{ctx: ctx}
	if err := s.check(); err != nil {
		return out, err
	}
	defer func() {
		err = caught(recover(), err)
		out.Seconds = float64(time.Since(began).Round(100*time.Millisecond)) / 1e9
	}()
	defer r.end()
	temporary := ""
	if r.dir = s.keep; r.dir == "" {
		if r.dir, err = os.MkdirTemp("", "writegate-proof-"); err != nil {
			return out, err
		}
		temporary = r.dir
	} else if err = os.MkdirAll(r.dir, 0o700); err != nil {
		return out, err
	}
	r.dir = filepath.Join(r.dir, fmt.Sprint(s.seed))
	r.must(os.MkdirAll(r.dir, 0o700))
	r.undertake()
	r.say("seed %d", s.seed)
	binary := r.build("worker", nil)
	for _, part := range []struct {
		name string
		run  func(settings, string, *result)
	}{
		{"campaign", r.campaign}, {"failover", r.failovers}, {"patroni", r.patroni}, {"hosts", r.hosts}, {"controls", r.controls},
	} {
		if slices.Contains(strings.Split(s.parts, ","), part.name) && ctx.Err() == nil {
			part.run(s, binary, &out)
		}
	}
	if s.keep == "" && out.Violations == 0 && out.Caught == out.Controls {
		r.Cleanup(func() { _ = os.RemoveAll(temporary) })
	}
	return out, ctx.Err()
}

// build makes the worker's program, from sources of which some are replaced.
func (r *run) build(name string, overlay map[string]string) string {
	r.Helper()
	out := filepath.Join(r.dir, "bin", name)
	args := []string{"build", "-o", out}
	if overlay != nil {
		text, err := json.Marshal(map[string]any{"Replace": overlay})
		r.must(err)
		file := out + ".json"
		r.must(os.MkdirAll(filepath.Dir(out), 0o700))
		r.must(os.WriteFile(file, text, 0o600))
		args = append(args, "-overlay", file)
	}
	cmd := exec.CommandContext(r.ctx, "go", append(args, "github.com/writegate/writegate/integration/proof")...)
	if said, err := cmd.CombinedOutput(); err != nil {
		r.Fatalf("go build: %v\n%s", err, said)
	}
	return out
}

// module is the directory of the whole.
func (r *run) module() string {
	r.Helper()
	dir, err := exec.CommandContext(r.ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	r.must(err)
	return strings.TrimSpace(string(dir))
}

// everything is the profile of the campaign itself.
func everything() profile {
	return profile{
		Workers: 6, Names: 6, Length: 10 * time.Second, TTL: 400 * time.Millisecond, Pooler: true, Pace: 300 * time.Millisecond,
		habits: habits{Stubs: 0.5, Zombies: 0.3, Live: 0.5, Linger: 0.15},
		Faults: map[string]int{
			"pause": 6, "kill": 4, "reset": 5, "half-open": 4, "lost replies": 8, "latency": 4, "clock": 6, "crash": 2, "terminate": 6,
			"lease lock": 6, "row lock": 4, "pooler": 2,
		},
	}
}

// campaign runs rounds on the real thing, each with a database of its own.
func (r *run) campaign(s settings, binary string, out *result) {
	r.Helper()
	rounds := 2
	more := func(i int) bool { return i < rounds || s.long && (out.Writes < s.writes || out.Faults < s.faults) }
	for i := 0; more(i); {
		r.scope(func(r *run) {
			b := newBed(r)
			for range 10 { // and then a new server, for the disk's sake
				p := everything()
				if s.long { // a fault for a thousand writes, and more of both at a time
					p.Workers, p.Lanes, p.Names, p.Length, p.Pace = 6, 4, 0, 30*time.Second, 1000*time.Millisecond
				}
				seed := s.seed + uint64(i)
				round := b.round(fmt.Sprintf("round_%d", i), seed, binary, p)
				round.lively = true
				c := round.play()
				i++
				round.judge(c)
				out.add(round, c, fmt.Sprintf("round %d, seed %d", i, seed), "")
				b.exec("", "DROP DATABASE "+round.name+" WITH (FORCE)")
				if !more(i) || r.ctx.Err() != nil {
					return
				}
			}
		})
		if r.ctx.Err() != nil {
			return
		}
	}
}

// play lets the workers work and the nemesis break things, and returns what there is to check.
func (r *round) play() *checker {
	r.t.Helper()
	began := time.Now()
	r.start()
	r.took("starting", began)
	ctx, cancel := context.WithTimeout(r.t.ctx, r.profile.Length)
	defer cancel()
	r.trouble(ctx)
	<-ctx.Done()
	if r.lively {
		r.atWork(0)
	}
	began = time.Now()
	r.stop()
	r.took("stopping", began)
	return r.checker()
}

func (r *round) took(what string, began time.Time) {
	if d := time.Since(began); d > 3*time.Second {
		r.t.say("%s: %s took %v", r.name, what, d.Round(time.Millisecond))
	}
}

func (r *round) checker() *checker {
	r.t.Helper()
	h, err := readHistory(r.dir)
	r.t.must(err)
	l, err := readLogs(r.t.ctx, r.server.Config(r.name))
	r.t.must(err)
	c := &checker{h: h, l: l, locks: r.locks}
	for _, p := range r.problems {
		c.violated(orderly, "%s", p)
	}
	return c
}

// report says what was violated, and keeps what the database said beside the histories.
func (c *checker) report(r *run, dir string) {
	for i, v := range c.found {
		if i == 10 {
			r.say("… and %d more", len(c.found)-i)
			break
		}
		r.say("VIOLATED: %s: %s", v.invariant, v.what)
	}
	if len(c.found) == 0 {
		return
	}
	var text strings.Builder
	for _, w := range c.l.writes {
		fmt.Fprintf(&text, "%+v\n", *w)
	}
	for _, l := range c.l.leases {
		fmt.Fprintf(&text, "%+v\n", *l)
	}
	_ = os.WriteFile(filepath.Join(dir, "database"), []byte(text.String()), 0o600)
	r.say("what was recorded is in %s", dir)
}

// judge checks all there is to check, and says what is wrong.
func (r *round) judge(c *checker) {
	c.check()
	began := time.Now()
	c.linear(r.dir, time.Minute)
	r.took("linearizability", began)
	c.report(r.t, r.dir)
}
