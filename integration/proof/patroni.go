//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/writegate/writegate/internal/pgtest"
)

// patroni runs a round on a cluster of two that Patroni keeps, with etcd, in the middle of which the leader is killed, as
// is what keeps it. Its standby is asynchronous, as is Patroni's default.
func (r *run) patroni(s settings, binary string, out *result) {
	r.Helper()
	r.scope(func(r *run) {
		k := newKeeper(r)
		k.member("etcd", "etcd", "--data-dir", filepath.Join(k.dir, "etcd"), "--listen-client-urls", k.url("etcd"), "--advertise-client-urls", k.url("etcd"),
			"--listen-peer-urls", k.url("peers"), "--initial-advertise-peer-urls", k.url("peers"), "--initial-cluster", "default="+k.url("peers"))
		for _, name := range []string{"one", "two"} {
			k.node(name)
			if name == "one" {
				k.leader("") // and then whoever joins copies it
			}
		}
		leader := k.leader("")
		k.replicating(leader)
		b := &bed{t: r, server: r.borrow(k.dsn(leader))}
		b.fill()
		round := b.round("patroni", s.seed, binary, overtaken())
		standby := r.borrow(k.dsn(map[string]string{"one": "two", "two": "one"}[leader]))
		r.await(standby, "SELECT count(*) = 1 FROM pg_database WHERE datname = '"+round.name+"'") // it is copied, and takes its time
		round.start()
		round.atWork(0)
		round.troubleFor(3 * time.Second)

		k.end(leader)
		after := time.Now().UnixNano()
		next := k.leader(leader)
		took := time.Duration(time.Now().UnixNano() - after)
		round.moveTo(r.borrow(k.dsn(next)), "leader killed", 3*time.Second)

		old := k.resurrect(leader)
		before, err := readLogs(r.ctx, old.Config(round.name))
		r.must(err)
		c := round.checker()
		c.followed(before, after)
		round.judge(c)
		out.add(round, c, "Patroni, another leader after "+took.Round(time.Second).String(), "")
	})
}

// keeper is a Patroni cluster.
type keeper struct {
	*run
	dir   string
	owner *syscall.Credential
	ports map[string]int
	cmds  map[string]*exec.Cmd
	bin   string
}

func newKeeper(r *run) *keeper {
	r.Helper()
	k := &keeper{run: r, ports: map[string]int{}, cmds: map[string]*exec.Cmd{}}
	var err error
	k.dir, k.owner, k.bin, err = pgtest.Scratch(r.ctx)
	r.must(err)
	r.Cleanup(func() { _ = os.RemoveAll(k.dir) })
	for _, what := range []string{"etcd", "peers", "one", "two", "one rest", "two rest"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		r.must(err)
		k.ports[what] = l.Addr().(*net.TCPAddr).Port
		defer func() { _ = l.Close() }()
	}
	return k
}

func (k *keeper) url(what string) string { return fmt.Sprintf("http://127.0.0.1:%d", k.ports[what]) }

func (k *keeper) dsn(name string) string {
	return fmt.Sprintf("postgres://postgres:proof@127.0.0.1:%d/postgres?sslmode=disable", k.ports[name])
}

// member starts a process in a group of its own, which ends with us.
func (k *keeper) member(name, program string, args ...string) {
	k.Helper()
	log, err := os.Create(filepath.Join(k.run.dir, name+".log"))
	k.must(err)
	cmd := exec.Command(program, args...)
	cmd.Dir = k.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + k.dir, "LC_ALL=C.UTF-8"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: k.owner, Setpgid: true}
	k.must(cmd.Start())
	k.cmds[name] = cmd
	k.Cleanup(func() { k.end(name) })
}

// end kills a process, and what it has started, and waits for it. The server that Patroni starts is in a group of its own.
func (k *keeper) end(name string) {
	cmd := k.cmds[name]
	if cmd == nil {
		return
	}
	delete(k.cmds, name)
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait()
	if text, err := os.ReadFile(filepath.Join(k.dir, name, "postmaster.pid")); err == nil {
		var pid int
		if _, err := fmt.Sscan(string(text), &pid); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // its backends notice
		}
	}
}

func (k *keeper) node(name string) {
	k.Helper()
	config := fmt.Sprintf(`
scope: proof
name: %[1]s
restapi: {listen: '127.0.0.1:%[2]d', connect_address: '127.0.0.1:%[2]d'}
etcd3: {hosts: ['127.0.0.1:%[3]d']}
bootstrap:
  dcs: {ttl: 20, loop_wait: 1, retry_timeout: 3, maximum_lag_on_failover: 1073741824, postgresql: {use_pg_rewind: false, parameters: {max_connections: 200, track_commit_timestamp: 'on', fsync: 'off', wal_keep_size: '512MB'}}}
  initdb: [{encoding: UTF8}, {locale: C}, 'no-sync']
postgresql:
  listen: '127.0.0.1:%[4]d'
  connect_address: '127.0.0.1:%[4]d'
  data_dir: '%[5]s/%[1]s'
  bin_dir: '%[6]s'
  pgpass: '%[5]s/%[1]s.pgpass'
  authentication: {superuser: {username: postgres, password: proof}, replication: {username: replicator, password: proof}}
  parameters: {unix_socket_directories: '%[5]s'}
  pg_hba: ['local all all trust', 'host all all 127.0.0.1/32 scram-sha-256', 'host replication replicator 127.0.0.1/32 scram-sha-256']
`, name, k.ports[name+" rest"], k.ports["etcd"], k.ports[name], k.dir, k.bin)
	file := filepath.Join(k.dir, name+".yml")
	k.must(os.WriteFile(file, []byte(config), 0o600))
	if k.owner != nil {
		k.must(os.Chown(file, int(k.owner.Uid), int(k.owner.Gid)))
	}
	k.member(name, "patroni", file)
}

// leader waits for one that is not but.
func (k *keeper) leader(but string) string {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.ctx, 2*time.Minute)
	defer cancel()
	for {
		for _, name := range []string{"one", "two"} {
			if name == but {
				continue
			}
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, k.url(name+" rest")+"/leader", nil)
			k.must(err)
			if answer, err := http.DefaultClient.Do(request); err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				_ = answer.Body.Close()
				if answer.StatusCode == http.StatusOK {
					return name
				}
			}
		}
		select {
		case <-time.After(100 * time.Millisecond): // Patroni does not call
		case <-ctx.Done():
			said, _ := os.ReadFile(filepath.Join(k.run.dir, "two.log"))
			k.Fatalf("Patroni has no leader within two minutes\n%s", said[max(0, len(said)-2000):])
		}
	}
}

// replicating waits until the leader has a standby.
func (k *keeper) replicating(leader string) {
	k.Helper()
	k.await(k.borrow(k.dsn(leader)), "SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming' AND application_name IN ('one', 'two')") // and not the copying
}

// resurrect starts the server of one that was killed, for us alone, to read what it knew.
func (k *keeper) resurrect(name string) *pgtest.Server {
	k.Helper()
	k.member("resurrected", filepath.Join(k.bin, "postgres"), "-D", filepath.Join(k.dir, name), "-c", "config_file="+filepath.Join(k.dir, name, "postgresql.base.conf"),
		"-c", "port="+strconv.Itoa(k.ports[name]), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="+k.dir, "-c", "track_commit_timestamp=on",
		"-c", "max_connections=200", "-c", "hba_file="+filepath.Join(k.dir, name, "pg_hba.conf"))
	return k.borrow(k.dsn(name))
}
