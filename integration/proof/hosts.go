//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"

	"github.com/writegate/writegate/internal/pgtest"
)

// hosts runs a round whose parts are on hosts of their own, as far as containers are: workers, proxy, pooler and server,
// with a network between that they can be cut off from.
//
// The image is that of scripts/postgres-image, which has PostgreSQL and PgBouncer; the worker's program is mounted into it.
func (r *run) hosts(s settings, binary string, out *result) {
	r.Helper()
	r.scope(func(r *run) {
		image := os.Getenv(pgtest.EnvImage)
		if image == "" {
			said, err := exec.CommandContext(r.ctx, "bash", filepath.Join(r.module(), "scripts/postgres-image")).Output()
			r.must(err)
			lines := strings.Fields(string(said))
			image = lines[len(lines)-1]
		}
		r.must(os.Chmod(r.dir, 0o711))
		h := &hosts{run: r, image: image, id: fmt.Sprintf("writegate-proof-%d", os.Getpid())}
		h.docker("network", "create", h.id)
		r.Cleanup(func() {
			left, _ := exec.Command("docker", "ps", "-aq", "--filter", "name="+h.id).Output()
			for _, container := range strings.Fields(string(left)) {
				h.try("rm", "-f", "-v", container)
			}
			h.try("network", "rm", h.id)
		})
		free, err := pgtest.FreePort()
		r.must(err)
		port := strconv.Itoa(free)
		h.container("db", "-p", "127.0.0.1:"+port+":5432", "-e", "POSTGRES_PASSWORD=proof", image, "postgres",
			"-c", "track_commit_timestamp=on", "-c", "fsync=off", "-c", "max_connections=200")
		b := &bed{t: r, server: r.borrow("postgres://postgres:proof@127.0.0.1:" + port + "/postgres?sslmode=disable")}
		b.fill()

		p := troubled()
		p.Workers, p.Length, p.TTL, p.Zombies, p.Stubs, p.Pace = 5, 15*time.Second, 600*time.Millisecond, 0.3, 0.5, 700*time.Millisecond
		p.Names = 0
		p.Faults = map[string]int{"host paused": 4, "host cut off": 4, "host killed": 3, "server's host paused": 1, "server's host killed": 1, "proxy's host killed": 1, "pooler's host paused": 1}
		round := b.round("hosts", s.seed, binary, p)
		round.hosts = h
		r.must(os.Chmod(round.dir, 0o777))
		h.container("proxy", "-v", binary+":/proof:ro", "--entrypoint", "/proof", "-e", envProxy+"="+h.name("db")+":5432", image)
		ini := filepath.Join(round.dir, "pgbouncer.ini")
		r.must(os.WriteFile(ini, []byte(fmt.Sprintf("[databases]\n* = host=%s port=5432 user=postgres password=proof\n[pgbouncer]\nlisten_addr = 0.0.0.0\nlisten_port = 5432\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 30\nmax_client_conn = 300\n", h.name("db"))), 0o644))
		h.container("pooler", "-v", ini+":/pgbouncer.ini:ro", "--user", "postgres", "--entrypoint", "/usr/sbin/pgbouncer", image, "/pgbouncer.ini")
		for i := range p.Workers {
			target := h.name([]string{"db", "proxy", "pooler"}[i%3])
			round.employ(&process{host: h}, i%3 == 2, fmt.Sprintf("postgres://postgres:proof@%s:5432/%s?sslmode=disable", target, round.name))
		}
		round.atWork(0)
		round.troubleFor(p.Length)
		round.stop()
		c := round.checker()
		round.judge(c)
		out.add(round, c, "hosts", "")
	})
}

const envProxy = "WRITEGATE_PROOF_PROXY" // what a process that is a proxy passes on to

// proxyMain is the whole of a process between a worker and the server.
func proxyMain(target string) error {
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	if err := toxiproxy.NewProxy(api, "postgres", "0.0.0.0:5432", target).Start(); err != nil {
		return err
	}
	select {}
}

type hosts struct {
	*run
	image, id string
}

func (h *hosts) name(part string) string { return h.id + "-" + part }

func (h *hosts) docker(args ...string) {
	h.Helper()
	said, err := exec.CommandContext(context.WithoutCancel(h.ctx), "docker", args...).CombinedOutput()
	if err != nil {
		h.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, said)
	}
}

// try is docker for what may be too late: a container that has just ended cannot be paused.
func (h *hosts) try(args ...string) {
	_ = exec.CommandContext(context.WithoutCancel(h.ctx), "docker", args...).Run()
}

func (h *hosts) container(part string, args ...string) {
	h.Helper()
	h.Cleanup(func() { h.try("rm", "-f", "-v", h.name(part)) })
	h.docker(append([]string{"run", "-d", "--name", h.name(part), "--network", h.id}, args...)...)
}

// borrow waits until a server that somebody else has started can be reached.
func (r *run) borrow(dsn string) *pgtest.Server {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, time.Minute)
	defer cancel()
	for {
		server, err := pgtest.Borrow(ctx, dsn)
		if err == nil {
			return server
		}
		select {
		case <-time.After(100 * time.Millisecond): // there is no event to wait for
		case <-ctx.Done():
			r.Fatalf("the server cannot be reached within a minute: %v", err)
		}
	}
}

// command is a worker's life in a container of its own. Its standard input is ours, by way of docker's client.
func (h *hosts) command(p *process, o orders) (*exec.Cmd, error) {
	o.History = "/history/" + filepath.Base(o.History)
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	p.container = h.name(strings.ReplaceAll(o.Worker, ".", "-"))
	return exec.Command("docker", "run", "-i", "--rm", "--name", p.container, "--network", h.id, "-v", p.binary+":/proof:ro", "-v", p.History+":/history",
		"--entrypoint", "/proof", "-e", envOrders+"="+string(text), h.image), nil
}

func init() {
	worker := func(then func(h *hosts, name string, wait func())) fault {
		return func(r *round, ctx context.Context, p *process, rng *rand.Rand) error {
			p.mu.Lock()
			name := p.container
			p.mu.Unlock()
			then(r.hosts, name, func() { r.wait(ctx, between(rng, r.ttl, 3*r.ttl)) })
			return nil
		}
	}
	part := func(name string, then func(h *hosts, name string, wait func())) fault {
		return func(r *round, ctx context.Context, _ *process, rng *rand.Rand) error {
			then(r.hosts, r.hosts.name(name), func() { r.wait(ctx, between(rng, r.ttl/2, 2*r.ttl)) })
			return nil
		}
	}
	pause := func(h *hosts, name string, wait func()) {
		h.try("pause", name)
		wait()
		h.try("unpause", name)
	}
	again := func(h *hosts, name string, _ func()) {
		h.try("kill", name)
		h.try("unpause", name) // which somebody else may just have paused
		h.docker("start", name)
	}
	faults["host paused"] = worker(pause)
	faults["host cut off"] = worker(func(h *hosts, name string, wait func()) {
		h.try("network", "disconnect", h.id, name)
		wait()
		h.try("network", "connect", h.id, name)
	})
	faults["host killed"] = func(r *round, _ context.Context, p *process, _ *rand.Rand) error {
		p.killing.Lock()
		defer p.killing.Unlock()
		p.mu.Lock()
		name, ended := p.container, p.ended
		p.mu.Unlock()
		r.hosts.try("unpause", name)
		r.hosts.try("kill", name)
		<-ended
		return p.start()
	}
	faults["server's host paused"] = part("db", pause)
	faults["server's host killed"] = part("db", again)
	faults["proxy's host killed"] = part("proxy", again)
	faults["pooler's host paused"] = part("pooler", pause)
}
