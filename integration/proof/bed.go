//go:build unix

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
)

// bed is a server with a database from which those of the rounds are copied.
type bed struct {
	t      *run
	server *pgtest.Server
}

const template = "proof_template"

// appSQL are the protected tables, and a log of all that is done to them and to the leases, written by triggers in the
// very transactions that do it: what is in it was committed, and is lost only with them. seq is drawn while the row that
// is logged is locked, and so orders the entries of each row, and those of a lease against the writes that lock it.
const appSQL = `
CREATE SCHEMA app;
CREATE TABLE app.once    (id int PRIMARY KEY, v text NOT NULL);
CREATE TABLE app.term    (id int PRIMARY KEY, v text NOT NULL);
CREATE TABLE app.guarded (id int PRIMARY KEY, v text NOT NULL);
SELECT fence.protect('app.once');
SELECT fence.protect('app.term', rule => 'term');
SELECT fence.protect('app.guarded', guard => 'enforce', unfenced => 'refuse');

CREATE SCHEMA proof;
CREATE SEQUENCE proof.seq;
CREATE TABLE proof.write_log (
    seq bigint PRIMARY KEY, xid bigint NOT NULL, at timestamptz NOT NULL, app text NOT NULL,
    relation text NOT NULL, id int NOT NULL, op text NOT NULL, old_fence bigint, new_fence bigint, old_value text, new_value text
);
CREATE TABLE proof.lease_log (
    seq bigint PRIMARY KEY, xid bigint NOT NULL, at timestamptz NOT NULL, app text NOT NULL,
    name text NOT NULL, old_fence bigint NOT NULL, new_fence bigint NOT NULL, granted_at timestamptz,
    old_expires_at timestamptz, new_expires_at timestamptz, old_released boolean NOT NULL, new_released boolean NOT NULL
);
CREATE FUNCTION proof.log_write() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    INSERT INTO proof.write_log
    VALUES (nextval('proof.seq'), pg_current_xact_id()::text::bigint, clock_timestamp(), current_setting('application_name'),
            TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME, coalesce(NEW.id, OLD.id), TG_OP, OLD.last_fence, NEW.last_fence, OLD.v, NEW.v);
    RETURN NULL;
END $$;
CREATE FUNCTION proof.log_tombstone() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    INSERT INTO proof.write_log
    VALUES (nextval('proof.seq'), pg_current_xact_id()::text::bigint, clock_timestamp(), current_setting('application_name'),
            NEW.relation::text, (NEW.row_key ->> 'id')::int, 'BURY', OLD.fence, NEW.fence, NULL, NULL);
    RETURN NULL;
END $$;
CREATE FUNCTION proof.log_lease() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF OLD.fence IS DISTINCT FROM NEW.fence OR OLD.expires_at IS DISTINCT FROM NEW.expires_at OR OLD.released_at IS DISTINCT FROM NEW.released_at THEN
        INSERT INTO proof.lease_log
        VALUES (nextval('proof.seq'), pg_current_xact_id()::text::bigint, clock_timestamp(), current_setting('application_name'),
                NEW.name, OLD.fence, NEW.fence, NEW.granted_at, nullif(OLD.expires_at, '-infinity'), NEW.expires_at,
                OLD.released_at IS NOT NULL, NEW.released_at IS NOT NULL);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER zz_log AFTER INSERT OR UPDATE OR DELETE ON app.once    FOR EACH ROW EXECUTE FUNCTION proof.log_write();
CREATE TRIGGER zz_log AFTER INSERT OR UPDATE OR DELETE ON app.term    FOR EACH ROW EXECUTE FUNCTION proof.log_write();
CREATE TRIGGER zz_log AFTER INSERT OR UPDATE OR DELETE ON app.guarded FOR EACH ROW EXECUTE FUNCTION proof.log_write();
CREATE TRIGGER zz_log AFTER INSERT OR UPDATE ON fence.tombstone FOR EACH ROW EXECUTE FUNCTION proof.log_tombstone();
CREATE TRIGGER zz_log AFTER UPDATE ON fence.lease FOR EACH ROW EXECUTE FUNCTION proof.log_lease();
`

// fillSQL puts the rows there, before the log is; $1 is their number.
const fillSQL = `
INSERT INTO app.once    SELECT i, 'seed' FROM generate_series(0, %[1]d - 1) i;
INSERT INTO app.term    SELECT i, 'seed' FROM generate_series(0, %[1]d - 1) i;
BEGIN;
SELECT fence.protect('app.guarded', guard => 'observe', unfenced => 'allow');
INSERT INTO app.guarded SELECT i, 'seed' FROM generate_series(0, %[1]d - 1) i;
SELECT fence.protect('app.guarded', guard => 'enforce', unfenced => 'refuse');
COMMIT;
`

const (
	names     = 16
	rowsOfOne = 3 // of a name in each table
)

func newBed(t *run, settings ...string) *bed {
	b := &bed{t: t, server: pgtest.Own(t, append([]string{"track_commit_timestamp = on", "shared_buffers = 128MB", "wal_keep_size = 512MB"}, settings...)...)}
	b.fill()
	return b
}

// fill makes the database that those of the rounds are copied from.
func (b *bed) fill() {
	t := b.t
	t.Helper()
	b.exec("", "CREATE DATABASE "+template)
	_, err := migrate.Up(t.ctx, b.server.Config(template))
	t.must(err)
	b.exec(template, strings.Replace(appSQL, "\nCREATE SCHEMA proof;", fmt.Sprintf(fillSQL, names*rowsOfOne)+"\nCREATE SCHEMA proof;", 1))
	b.exec(template, "TRUNCATE fence.observation")
}

// exec runs SQL on a database of the bed's server.
func (b *bed) exec(database, sql string) {
	b.t.Helper()
	b.t.must(execOn(b.t.ctx, b.server.Config(database), sql))
}

func execOn(ctx context.Context, cfg *pgx.ConnConfig, sql string) error {
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	_, err = conn.Exec(ctx, sql)
	return err
}

// database makes one for a round.
func (b *bed) database(name string) {
	b.t.Helper()
	b.exec("", "CREATE DATABASE "+name+" TEMPLATE "+template+" STRATEGY file_copy")
}

// link is a worker's own way to the database, through a proxy that can be disturbed.
type link struct {
	proxy *toxiproxy.Proxy
	mu    sync.Mutex // one disturbance at a time
}

func newLink(t *run, target string) *link {
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	l := &link{proxy: toxiproxy.NewProxy(api, "postgres", "127.0.0.1:0", target)}
	t.must(l.proxy.Start())
	return l
}

func (l *link) toxic(kind, stream, attributes string) error {
	_, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(
		fmt.Sprintf(`{"name":%q,"type":%q,"stream":%q,"attributes":{%s}}`, kind+"-"+stream, kind, stream, attributes)))
	return err
}

func (l *link) mend() { l.proxy.Toxics.ResetToxics(context.Background()) }

// cut ends all connections, and takes new ones at once.
func (l *link) cut() error {
	l.proxy.Stop()
	return l.proxy.Start()
}

// aim sends all to another server from now on.
func (l *link) aim(target string) error {
	l.proxy.Stop()
	l.mend()
	l.proxy.Upstream = target
	return l.proxy.Start()
}

func addressOf(cfg *pgx.ConnConfig) string {
	return net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))
}

// process is a worker, in all its lives.
type process struct {
	orders
	binary string
	link   *link
	host   *hosts // it has one of its own
	life   int

	killing sync.Mutex // one end at a time

	mu    sync.Mutex
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{} // closed when it has
	err   error         // how
	log   *os.File

	container string // of this life
}

func (p *process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.life++
	o := p.orders
	o.Worker = fmt.Sprintf("%s.%d", p.Worker, p.life)
	o.History = filepath.Join(p.History, o.Worker+".history")
	o.Seed = p.Seed + uint64(p.life)<<32
	cmd, err := p.command(o)
	if err != nil {
		return err
	}
	if p.log, err = os.Create(filepath.Join(p.History, o.Worker+".log")); err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(ended)
	}()
	p.cmd, p.ended = cmd, ended
	return os.WriteFile(filepath.Join(filepath.Dir(p.History), "pids", p.Worker), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

func (p *process) command(o orders) (*exec.Cmd, error) {
	if p.host != nil {
		return p.host.command(p, o)
	}
	text, err := json.Marshal(o)
	cmd := exec.Command(p.binary)
	cmd.Env = append(os.Environ(), envOrders+"="+string(text))
	return cmd, err
}

func (p *process) say(words ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.stdin, strings.Join(words, " ")+"\n") // to one that has just been killed: to nobody
}

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.cmd.Process.Signal(s)
}

// kill ends the process where it stands, and begins its next life.
func (p *process) kill() error {
	p.killing.Lock()
	defer p.killing.Unlock()
	p.signal(syscall.SIGKILL)
	<-p.ended
	_ = p.stdin.Close()
	_ = p.log.Close()
	return p.start()
}

// stop has the process end what it has begun, and waits for that.
func (p *process) stop() error {
	p.killing.Lock()
	defer p.killing.Unlock()
	defer func() { _ = os.Remove(filepath.Join(filepath.Dir(p.History), "pids", p.Worker)) }()
	p.signal(syscall.SIGCONT)
	p.say(sayStop)
	select {
	case <-p.ended:
		_ = p.stdin.Close()
		_ = p.log.Close()
		if p.err != nil {
			said, _ := os.ReadFile(p.log.Name())
			return fmt.Errorf("worker %s.%d: %w\n%s", p.Worker, p.life, p.err, said)
		}
		return nil
	case <-time.After(time.Minute):
		p.signal(syscall.SIGQUIT)
		<-p.ended
		said, _ := os.ReadFile(p.log.Name())
		return fmt.Errorf("worker %s.%d does not stop\n%s", p.Worker, p.life, said)
	}
}

// round is a stretch of time with a database, workers and faults of its own.
type round struct {
	*bed
	name     string
	seed     uint64
	rng      *rand.Rand
	dir      string
	binary   string
	workers  []*process
	pooler   *pgtest.RunningPooler
	hosts    *hosts
	lively   bool // something has to happen in it
	ttl      time.Duration
	profile  profile
	faults   int
	kinds    map[string]int
	locks    []locked
	mu       sync.Mutex
	problems []string
}

// profile says what is done in a round.
type profile struct {
	Workers int
	Lanes   int // of each; 0: two
	Length  time.Duration
	TTL     time.Duration
	Pooler  bool
	Names   int            // of leases; 0: all there are
	Faults  map[string]int // weights
	Pace    time.Duration  // between two faults, on average
	habits
}

// locked says that a lease's row was locked by nobody's work, from some time after from until some time after until.
type locked struct {
	name        string
	from, until int64
}

func (b *bed) round(name string, seed uint64, binary string, p profile) *round {
	b.t.Helper()
	r := &round{
		bed: b, name: name, seed: seed, rng: rand.New(rand.NewPCG(seed, 7)), binary: binary, ttl: p.TTL, profile: p,
		dir: filepath.Join(b.t.dir, name), kinds: map[string]int{},
	}
	b.t.must(os.MkdirAll(r.dir, 0o700))
	b.database(name)
	if p.Pooler {
		r.pooler = b.server.Pooler(b.t, "transaction")
	}
	return r
}

// start starts the workers.
func (r *round) start() {
	r.t.Helper()
	direct := r.server.TCP(r.name)
	for i := range r.profile.Workers {
		target, pooled := addressOf(direct), false
		if r.pooler != nil && i%3 == 2 {
			target, pooled = addressOf(r.pooler.Config(r.name)), true
		}
		l := newLink(r.t, target)
		r.employ(&process{link: l}, pooled, fmt.Sprintf("postgres://%s:%s@%s/%s?sslmode=disable", direct.User, direct.Password, l.proxy.Listen, r.name))
	}
}

// employ starts one more worker, which reaches the database by the DSN.
func (r *round) employ(p *process, pooled bool, dsn string) {
	r.t.Helper()
	i := len(r.workers)
	p.binary = r.binary
	p.orders = orders{
		Worker: "w" + strconv.Itoa(i), DSN: dsn, Pooled: pooled, SQL: i%4 == 1, Names: cmp.Or(r.profile.Names, names), Rows: rowsOfOne, TTL: r.ttl,
		Lanes: cmp.Or(r.profile.Lanes, 2), Seed: r.seed + uint64(i)*1000, History: r.dir, habits: r.profile.habits,
	}
	r.workers = append(r.workers, p)
	r.t.must(p.start())
}

// stop ends what has been disturbed, and then the workers.
func (r *round) stop() {
	r.t.Helper()
	var wg sync.WaitGroup
	for _, p := range r.workers {
		if p.link != nil {
			p.link.mend()
		}
	}
	for _, p := range r.workers {
		wg.Go(func() {
			if err := p.stop(); err != nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.problems = append(r.problems, err.Error())
			}
		})
	}
	wg.Wait()
	for _, p := range r.workers {
		if p.link != nil {
			p.link.proxy.Stop()
		}
	}
	if r.pooler != nil {
		r.t.must(r.pooler.Stop())
		if fell := r.pooler.Fell(); fell != "" {
			r.t.say("%s: PgBouncer has ended by itself, and was started again: %s", r.name, fell)
		}
	}
}

// moveTo leads the workers to another server, with all that they hold, and goes on there for a while.
func (r *round) moveTo(server *pgtest.Server, fault string, d time.Duration) {
	r.t.Helper()
	for _, w := range r.workers {
		r.t.must(w.link.aim(addressOf(server.TCP(r.name))))
	}
	r.server = server
	var known int
	r.t.must(queryRow(r.t.ctx, server.Config(r.name), "SELECT count(*) FROM proof.write_log", &known))
	r.faults++
	r.kinds[fault]++
	r.troubleFor(d)
	r.atWork(known)
	r.stop()
}

// atWork waits until something has been written, since there were so many entries in the log, on the server that there is: a
// round in which nothing happens proves nothing.
func (r *round) atWork(since int) {
	r.t.Helper()
	r.t.await(r.server, fmt.Sprintf("SELECT count(*) > %d FROM proof.write_log", since), r.name)
}
