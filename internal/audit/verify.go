package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Severity says how bad a finding is.
type Severity string

// The severities.
const (
	SeverityError   Severity = "error"   // the promise does not hold, or a lawful holder is refused
	SeverityWarning Severity = "warning" // the promise holds for now, or is harder to keep, or to check
	SeverityInfo    Severity = "info"    // good to know
)

// Severities are all of them, the worst first.
var Severities = []Severity{SeverityError, SeverityWarning, SeverityInfo}

// AtLeast reports whether s is as bad as other, or worse.
func (s Severity) AtLeast(other Severity) bool {
	return slices.Index(Severities, s) <= slices.Index(Severities, other)
}

// Finding is something that is wrong.
type Finding struct {
	ID       string   `json:"id"` // of the check; stable between versions
	Severity Severity `json:"severity"`
	Object   string   `json:"object"` // what it is about: a table, a lease, a role, a setting
	Finding  string   `json:"finding"`
	Fix      string   `json:"fix"`
	Accepted string   `json:"accepted,omitempty"` // the baseline's reason for living with it
}

// Unchecked is a check that did not run, or not to its end.
type Unchecked struct {
	ID     string `json:"id"`
	Object string `json:"object"`
	Why    string `json:"why"`
}

// Verification is what came of the checks.
type Verification struct {
	Checks    []string    `json:"checks"`   // those that ran to their end
	Findings  []Finding   `json:"findings"` // the worst first
	Unchecked []Unchecked `json:"unchecked"`
	Notes     []string    `json:"notes,omitempty"` // what else is to be known: what was sampled, or skipped on request
}

// Open returns the findings that nobody has accepted and that are at least that severe.
func (v *Verification) Open(least Severity) []Finding {
	var open []Finding
	for _, f := range v.Findings {
		if f.Accepted == "" && f.Severity.AtLeast(least) {
			open = append(open, f)
		}
	}
	return open
}

// VerifyOptions say what to check, and how hard.
type VerifyOptions struct {
	Skip []string  // ids of checks that are not to run
	Only []string  // ids of those that are; empty: all
	Scan ScanLimit // how to read the rows of protected tables
	// Since is the time from which rejections count; zero: all that there are.
	Since time.Time
}

// ErrNoChecks says that all that was asked for was skipped.
var ErrNoChecks = errors.New("nothing is left to check")

// Verify runs the checks. Its error is for what keeps all of them from running; a check that cannot run is in the result.
// Between the checks it holds nothing: each looks at the database as it finds it.
func Verify(ctx context.Context, q Querier, database string, opt VerifyOptions) (*Verification, error) {
	for _, id := range append(slices.Clone(opt.Skip), opt.Only...) {
		if _, ok := CheckByID(id); !ok {
			return nil, fmt.Errorf("there is no check %q: fencecheck explain lists them", id)
		}
	}
	if !slices.ContainsFunc(checks, func(c Check) bool { return (&verifier{opt: opt}).wanted(c.ID) }) {
		return nil, ErrNoChecks
	}
	version, err := CheckSchema(ctx, q, database)
	if err != nil {
		return nil, err
	}
	v := &verifier{ctx: ctx, q: q, version: version, opt: opt, unchecked: map[string]bool{}}
	if err := q.QueryRow(ctx, `SELECT pg_catalog.pg_is_in_recovery()`).Scan(&v.standby); err != nil {
		return nil, fmt.Errorf("asking whether this is a standby: %w", err)
	}
	v.result.Checks, v.result.Findings, v.result.Unchecked = []string{}, []Finding{}, []Unchecked{}
	for _, p := range probes {
		v.run(p)
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
	}
	for _, c := range checks {
		if v.wanted(c.ID) && !v.unchecked[c.ID] {
			v.result.Checks = append(v.result.Checks, c.ID)
		}
	}
	if len(opt.Only) > 0 {
		v.result.Notes = append(v.result.Notes, fmt.Sprintf("only these checks were asked for: %s", strings.Join(opt.Only, ", ")))
	}
	if len(opt.Skip) > 0 {
		v.result.Notes = append(v.result.Notes, "not asked for: "+strings.Join(opt.Skip, ", "))
	}
	slices.SortStableFunc(v.result.Findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(Severities, a.Severity), slices.Index(Severities, b.Severity))
	})
	return &v.result, nil
}

// verifier is one run of the checks.
type verifier struct {
	ctx       context.Context
	q         Querier
	version   int
	standby   bool
	opt       VerifyOptions
	result    Verification
	unchecked map[string]bool
}

// probe runs checks that look at the same things.
type probe struct {
	ids         []string
	oldest      int      // version of the schema
	reads       []string // relations of schema fence
	primaryOnly bool     // a standby would tell about itself
	run         func(*verifier) error
}

var probes = []probe{
	{ids: []string{"schema-old", "schema-new"}, run: (*verifier).schema},
	{ids: []string{"schema-unlogged"}, run: (*verifier).unlogged},
	{ids: []string{"schema-changed"}, run: (*verifier).functions},
	{ids: []string{"sequence-definition", "sequence-headroom", "sequence-ahead"}, reads: []string{"fence_seq"}, run: (*verifier).sequence},
	{ids: []string{"epoch-missing"}, reads: []string{"epoch", "lease"}, run: (*verifier).epochMissing},
	{ids: []string{"epoch-changed", "timeline-unreadable"}, reads: []string{"epoch"}, primaryOnly: true, run: (*verifier).epoch},
	{ids: []string{"sequence-behind"}, oldest: 3, reads: []string{"fence_seq", "lease", "term", "tombstone"}, run: (*verifier).sequenceBehind},
	{ids: []string{"sequence-behind", "fence-unknown", "fence-negative", "fence-null"}, reads: []string{"fence_seq", "term", "protected_table"}, run: (*verifier).rows},
	{ids: []string{
		"table-gone", "fence-column-missing", "fence-column-type", "fence-column-nullable", "fence-column-default", "table-unlogged", "table-inherited", "table-rules",
		"guard-later-trigger", "guard-outdated",
	}, oldest: 4, reads: []string{"protected_table"}, run: (*verifier).tables},
	{ids: []string{"guard-missing", "guard-disabled", "guard-differs", "guard-truncate"}, oldest: 4, reads: []string{"protected_table"}, run: (*verifier).guards},
	{ids: []string{"guard-bypass"}, oldest: 5, reads: []string{"protected_table", "allowed"}, run: (*verifier).bypass},
	{ids: []string{"unfenced-writes"}, oldest: 4, reads: []string{"observation"}, run: (*verifier).unfenced},
	{ids: []string{"rejection-lawful"}, reads: []string{"rejection"}, run: (*verifier).lawful},
	{ids: []string{"audit-loss"}, oldest: 3, reads: []string{"audit_loss"}, run: (*verifier).losses},
	{ids: []string{"lease-overdue", "lease-late"}, reads: []string{"lease"}, run: (*verifier).leases},
	{ids: []string{"lease-index"}, run: (*verifier).leaseIndex},
	{ids: []string{"lease-hot"}, primaryOnly: true, run: (*verifier).leaseHot},
	{ids: []string{"role-gone", "privilege-missing"}, oldest: 5, reads: []string{"allowed"}, run: (*verifier).roles},
	{ids: []string{"privilege-excess"}, run: (*verifier).excess},
	{ids: []string{"isolation-default", "synchronous-commit"}, run: (*verifier).defaults},
	{ids: []string{"fsync-off"}, primaryOnly: true, run: (*verifier).fsync},
	{ids: []string{"synchronous-standby", "synchronous-missing"}, primaryOnly: true, run: (*verifier).standbys},
}

func (v *verifier) wanted(id string) bool {
	return !slices.Contains(v.opt.Skip, id) && (len(v.opt.Only) == 0 || slices.Contains(v.opt.Only, id))
}

func (v *verifier) run(p probe) {
	if !slices.ContainsFunc(p.ids, v.wanted) {
		return
	}
	err := func() error {
		if v.standby && p.primaryOnly {
			return errors.New("this is a standby, which tells about itself: ask the primary")
		}
		if p.oldest > 0 {
			if err := pgerr.CheckSchema(v.version, p.oldest); err != nil {
				return err
			}
		}
		if err := mayRead(v.ctx, v.q, p.reads...); err != nil {
			return err
		}
		return attempt(v.ctx, v.q, func(q Querier) error {
			was := v.q
			v.q = q
			defer func() { v.q = was }()
			return p.run(v)
		})
	}()
	if err != nil {
		for _, id := range p.ids {
			v.cannot(id, "", err.Error())
		}
	}
}

func (v *verifier) cannot(id, object, why string) {
	if v.wanted(id) {
		v.unchecked[id] = true
		v.result.Unchecked = append(v.result.Unchecked, Unchecked{id, object, why})
	}
}

func (v *verifier) find(id, object, fix, finding string, args ...any) {
	c, ok := CheckByID(id)
	if !ok {
		panic("no check " + id)
	}
	if !v.wanted(id) {
		return
	}
	if fix == "" {
		fix = c.Action
	}
	v.result.Findings = append(v.result.Findings, Finding{ID: id, Severity: c.Severity, Object: object, Finding: fmt.Sprintf(finding, args...), Fix: fix})
}

// findEach makes a finding of each row: the object, what was found, and the fix, ” for the check's own.
func (v *verifier) findEach(id, sql string, args ...any) error {
	rows, err := v.q.Query(v.ctx, sql, args...)
	if err != nil {
		return err
	}
	var object, finding, fix string
	_, err = pgx.ForEachRow(rows, []any{&object, &finding, &fix}, func() error {
		v.find(id, object, fix, "%s", finding)
		return nil
	})
	return err
}

func (v *verifier) schema() error {
	switch {
	case v.version < pgerr.SchemaVersion:
		v.find("schema-old", "schema fence", "", "it is at version %d, this program brings %d", v.version, pgerr.SchemaVersion)
	case v.version > pgerr.SchemaVersion:
		v.find("schema-new", "schema fence", "", "it is at version %d, this program knows %d", v.version, pgerr.SchemaVersion)
	}
	return nil
}

func (v *verifier) unlogged() error {
	return v.findEach("schema-unlogged", `
		SELECT format('%I.%I', n.nspname, c.relname), 'it is unlogged: a crash empties it', format('ALTER %s %I.%I SET LOGGED', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, n.nspname, c.relname)
		  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		 WHERE n.nspname = 'fence' AND c.relkind IN ('r', 'p', 'S') AND c.relpersistence <> 'p' ORDER BY 1`)
}

const sequenceSQL = `
SELECT concat_ws(', ',
           CASE WHEN s.seqtypid <> 'bigint'::regtype THEN 'it is ' || format_type(s.seqtypid, -1) || ', not bigint' END,
           CASE WHEN s.seqincrement <> 2 THEN format('it increments by %s, not 2', s.seqincrement) END,
           CASE WHEN s.seqmin <> 2 THEN format('its least value is %s, not 2', s.seqmin) END,
           CASE WHEN s.seqmax <> 9007199254740990 THEN format('its greatest value is %s, not 9007199254740990', s.seqmax) END,
           CASE WHEN s.seqcache <> 1 THEN format('it caches %s values a session, not 1', s.seqcache) END,
           CASE WHEN s.seqcycle THEN 'it cycles' END,
           CASE WHEN c.relpersistence <> 'p' THEN 'it is not logged' END,
           CASE WHEN EXISTS (SELECT 1 FROM pg_catalog.pg_depend d
                              WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.refclassid = 'pg_class'::regclass
                                AND d.refobjsubid > 0 AND d.deptype IN ('a', 'i')) THEN 'a table''s column owns it' END),
       q.last_value, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint
  FROM pg_catalog.pg_sequence s JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid CROSS JOIN fence.fence_seq q
 WHERE s.seqrelid = 'fence.fence_seq'::regclass`

// maxFence is where fences end.
const maxFence = 9007199254740990

func (v *verifier) sequence() error {
	var wrong string
	var last, clock int64
	if err := v.q.QueryRow(v.ctx, sequenceSQL).Scan(&wrong, &last, &clock); err != nil {
		return err
	}
	if wrong != "" {
		v.find("sequence-definition", "fence.fence_seq", "", "%s", wrong)
	}
	if last > maxFence/10*9 {
		v.find("sequence-headroom", "fence.fence_seq", "", "it stands at %d, and ends at %d", last, int64(maxFence))
	}
	if last > clock+60_000_000 { // a minute: clocks of two servers differ
		v.find("sequence-ahead", "fence.fence_seq", "", "it stands at %d; the clock's microseconds are %d", last, clock)
	}
	return nil
}

func (v *verifier) epochMissing() error {
	return v.findEach("epoch-missing", `SELECT 'fence.epoch', 'it is empty although leases have been granted', ''
		WHERE NOT EXISTS (SELECT 1 FROM fence.epoch) AND EXISTS (SELECT 1 FROM fence.lease l WHERE l.fence > 0)`)
}

// epochSQL asks as this role what grants ask as the owner of the schema. What this role may not ask is taken from the last grant.
const epochSQL = `
SELECT concat_ws(', ',
           CASE WHEN e.server_started_at <> pg_postmaster_start_time() THEN 'it was started at ' || to_char(pg_postmaster_start_time() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"') END,
           CASE WHEN e.sequence_file <> pg_relation_filepath('fence.fence_seq') THEN 'the sequence was restarted or made anew, or is in another database' END),
       e.timeline IS NULL
  FROM fence.epoch e WHERE e.reason <> 'installed' ORDER BY e.id DESC LIMIT 1`

func (v *verifier) epoch() error {
	var changed string
	var blind bool
	err := v.q.QueryRow(v.ctx, epochSQL).Scan(&changed, &blind)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	if changed != "" {
		v.find("epoch-changed", "fence.epoch", "", "since the last grant: %s", changed)
	}
	if blind {
		v.find("timeline-unreadable", "fence.epoch", "", "the last grant could not read the timeline")
	}
	return nil
}

func (v *verifier) sequenceBehind() error {
	// The sequence last: what is granted while this reads is ahead of it, and no finding.
	return v.findEach("sequence-behind", `
		WITH held AS MATERIALIZED (
			SELECT 'fence.lease' AS source, max(l.fence) AS fence FROM fence.lease l
			 UNION ALL SELECT 'fence.term', max(t.fence) FROM fence.term t
			 UNION ALL SELECT 'fence.tombstone of ' || `+qualifiedOf("b.relation")+`, max(b.fence) FROM fence.tombstone b GROUP BY b.relation)
		SELECT h.source, format('it holds fences up to %s, and the next that is granted is %s: its holder would be refused', h.fence, q.next), ''
		  FROM held h CROSS JOIN (SELECT CASE WHEN s.is_called THEN s.last_value + 2 ELSE s.last_value END AS next FROM fence.fence_seq s) q
		 WHERE h.fence >= q.next ORDER BY 1`)
}

func (v *verifier) tables() error {
	faults, err := tableFaults(v.ctx, v.q)
	if err != nil {
		return err
	}
	for _, f := range faults {
		v.find(f.ID, f.Object, f.Fix, "%s", f.Finding)
	}
	return nil
}

func (v *verifier) guards() error {
	faults, keys, err := guardFaults(v.ctx, v.q)
	if err != nil {
		return err
	}
	for _, f := range faults {
		v.find(f.ID, f.Object, f.Fix, "%s", f.Finding)
	}
	if !keys {
		v.cannot("guard-differs", "", missingGrants(v.ctx, v.q, errors.New("permission denied"), "GRANT EXECUTE ON FUNCTION fence.keys_of").Error())
	}
	return nil
}

func (v *verifier) bypass() error {
	if err := v.findEach("guard-bypass", `
		SELECT `+settingOf+`, 'session_replication_role is ' || split_part(c.setting, '=', 2) || ': no guard fires', `+resetOf("session_replication_role")+`
		  FROM `+roleSettings+` WHERE lower(c.setting) LIKE 'session\_replication\_role=%' AND lower(c.setting) NOT LIKE '%=origin' ORDER BY 1`); err != nil {
		return err
	}
	var grants bool // from PostgreSQL 15 on
	if err := v.q.QueryRow(v.ctx, `SELECT to_regclass('pg_catalog.pg_parameter_acl') IS NOT NULL`).Scan(&grants); err != nil {
		return err
	}
	if grants {
		if err := v.findEach("guard-bypass", `
			SELECT 'role ' || CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, 'it may set session_replication_role, with which no guard fires',
			       'REVOKE SET ON PARAMETER session_replication_role FROM ' || CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END
			  FROM pg_catalog.pg_parameter_acl p CROSS JOIN LATERAL aclexplode(p.paracl) a
			  LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
			 WHERE p.parname = 'session_replication_role' AND a.privilege_type = 'SET' AND NOT coalesce(r.rolsuper, false) ORDER BY 1`); err != nil {
			return err
		}
	}
	return v.findEach("guard-bypass", `
		SELECT `+qualified+`, format('role %s, which holds leases, owns it and can disable its guard', quote_ident(a.role)), format('ALTER TABLE %s OWNER TO a role that no application uses', `+qualified+`)
		  FROM fence.protected_table p JOIN pg_catalog.pg_class c ON c.oid = p.relation
		  JOIN fence.allowed a ON a.what = 'holder' JOIN pg_catalog.pg_roles r ON r.rolname = a.role
		 WHERE p.guard <> 'off' AND pg_has_role(r.oid, c.relowner, 'USAGE') ORDER BY 1, 2`)
}

func (v *verifier) unfenced() error {
	return v.findEach("unfenced-writes", `
		SELECT `+qualifiedOf("o.relation")+`, format('%s %s by %s', o.operation, o.finding, string_agg(DISTINCT format('%s (%s)', coalesce(nullif(o.application_name, ''), '?'), o.db_user), ', ')), ''
		  FROM fence.observation o GROUP BY o.relation, o.operation, o.finding ORDER BY 1, 2`)
}

func (v *verifier) lawful() error {
	return v.findEach("rejection-lawful", `
		SELECT r.table_name, format('refusals of lawful holders: %s, of rows: %s, the last at %s (fencecheck rejections show %s)', sum(r.count), count(*),
		                            to_char(max(r.last_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'), (array_agg(r.id ORDER BY r.last_at DESC))[1]), ''
		  FROM fence.rejection r WHERE r.verdict = 'lawful' AND ($1::timestamptz IS NULL OR r.last_at >= $1) GROUP BY r.table_name ORDER BY 1`, orNil(v.opt.Since))
}

func (v *verifier) losses() error {
	return v.findEach("audit-loss", `
		SELECT coalesce(nullif(l.application_name, ''), '?') || ' as ' || quote_ident(l.db_user),
		       format('refusals that could not be recorded: %s, the last reported at %s', l.count, to_char(l.last_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"')), ''
		  FROM fence.audit_loss l ORDER BY 1`)
}

// leases names some: of many that are overdue for one reason the first are as good as all.
func (v *verifier) leases() error {
	const most = 100
	leases, cut, err := Leases(v.ctx, v.q, LeaseFilter{Overdue: true, Limit: most})
	if err != nil {
		return err
	}
	for _, l := range leases {
		if l.Overdue {
			v.find("lease-overdue", "lease "+l.Name, "", "held by %q under fence %d, it expired %s ago, and nobody has followed", l.Holder, l.Fence, Duration(-l.Remaining))
		} else {
			v.find("lease-late", "lease "+l.Name, "", "%q has not renewed it for %s of its %s", l.Holder, Duration(l.RenewalAge), Duration(l.TTL))
		}
	}
	if cut {
		v.result.Notes = append(v.result.Notes, fmt.Sprintf("more than %d leases are overdue or late; the first %d are named", most, most))
	}
	return nil
}

func (v *verifier) leaseIndex() error {
	return v.findEach("lease-index", `
		SELECT i.indexrelid::regclass::text, 'renewals have to maintain it: ' || pg_get_indexdef(i.indexrelid), 'DROP INDEX ' || i.indexrelid::regclass
		  FROM pg_catalog.pg_index i WHERE i.indrelid = 'fence.lease'::regclass AND NOT i.indisprimary ORDER BY 1`)
}

func (v *verifier) leaseHot() error {
	return v.findEach("lease-hot", `
		SELECT 'fence.lease', format('%s of %s updates were HOT (%s %%), and %s dead rows wait for vacuum', s.n_tup_hot_upd, s.n_tup_upd, s.n_tup_hot_upd * 100 / s.n_tup_upd, s.n_dead_tup), ''
		  FROM pg_catalog.pg_stat_all_tables s WHERE s.relid = 'fence.lease'::regclass AND s.n_tup_upd >= 10000 AND s.n_tup_hot_upd * 10 < s.n_tup_upd * 9`)
}

// What fence.allow gives. A test compares.
var (
	holderFunctions = []string{"acquire", "renew", "release", "live", "dear", "enter", "lease_state", "pin", "no_longer", "transaction_fate", "floor",
		"buried", "bury", "request_is_new", "request_applied", "request_result", "record_rejections"}
	auditorTables = []string{"term", "epoch", "protected_table", "rejection", "tombstone", "request", "audit_loss", "observation", "allowed", "pruned"}
)

func (v *verifier) roles() error {
	if err := v.findEach("role-gone", `
		SELECT 'role ' || quote_ident(a.role), 'it does not exist', format('SELECT fence.disallow(%L)', a.role)
		  FROM fence.allowed a WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = a.role) GROUP BY a.role ORDER BY 1`); err != nil {
		return err
	}
	return v.findEach("privilege-missing", `
		SELECT 'role ' || quote_ident(a.role), format('it is allowed as %s, and lacks: %s', a.what, string_agg(m.grant, '; ' ORDER BY m.grant)), format('SELECT fence.allow(%L, %L)', a.role, a.what)
		  FROM fence.allowed a JOIN pg_catalog.pg_roles r ON r.rolname = a.role
		 CROSS JOIN LATERAL (
			SELECT 'USAGE ON SCHEMA fence' AS grant WHERE NOT has_schema_privilege(r.oid, 'fence', 'USAGE')
			UNION ALL SELECT 'EXECUTE ON FUNCTION fence.' || f.proname FROM pg_catalog.pg_proc f
			 WHERE f.pronamespace = 'fence'::regnamespace AND a.what = 'holder' AND f.proname = ANY ($1::text[]) AND NOT has_function_privilege(r.oid, f.oid, 'EXECUTE')
			UNION ALL SELECT 'SELECT ON fence.' || c.relname FROM pg_catalog.pg_class c
			 WHERE c.relnamespace = 'fence'::regnamespace AND (a.what = 'holder' AND c.relname = 'protected_table' OR a.what = 'auditor' AND c.relname = ANY ($2::text[]))
			   AND c.relkind = 'r' AND NOT has_table_privilege(r.oid, c.oid, 'SELECT')
			UNION ALL SELECT 'SELECT (' || replace($3, ',', ', ') || ') ON fence.lease' WHERE a.what = 'auditor' AND EXISTS (
				SELECT 1 FROM unnest(string_to_array($3, ',')) x WHERE NOT has_column_privilege(r.oid, 'fence.lease'::regclass, x, 'SELECT'))) m
		 GROUP BY a.role, a.what ORDER BY 1, 2`, holderFunctions, auditorTables, leaseColumns)
}

// What everybody may call: it tells the version.
var publicFunctions = []string{"schema_version"}

// What fence.allow lets auditors call.
var auditorFunctions = []string{"keys_of"}

func (v *verifier) excess() error {
	// What was granted on tables, and on columns of them.
	if err := v.findEach("privilege-excess", `
		WITH granted AS (
			SELECT c.relname, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee, a.privilege_type
			  FROM pg_catalog.pg_class c
			 CROSS JOIN LATERAL (SELECT x.grantee, x.privilege_type FROM aclexplode(c.relacl) x
			                     UNION SELECT y.grantee, y.privilege_type FROM pg_catalog.pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) y
			                      WHERE t.attrelid = c.oid AND (y.privilege_type <> 'SELECT' OR t.attname IN ('token', 'revoked', 'key'))) a
			 WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind IN ('r', 'p', 'S') AND a.grantee <> c.relowner)
		SELECT 'role ' || g.grantee, format('it has %s on fence.%I', string_agg(g.privilege_type, ', ' ORDER BY g.privilege_type), g.relname),
		       format('REVOKE %s ON fence.%I FROM %s', string_agg(g.privilege_type, ', ' ORDER BY g.privilege_type), g.relname, g.grantee)
		  FROM granted g
		 WHERE g.privilege_type <> 'SELECT' AND g.privilege_type <> 'MAINTAIN' AND g.relname <> 'goose_db_version'
		    OR g.privilege_type = 'SELECT' AND g.relname IN ('lease', 'secret')
		 GROUP BY g.grantee, g.relname ORDER BY 1, 2`); err != nil {
		return err
	}
	// What comes by being a member of another role, those that PostgreSQL defines included.
	if err := v.findEach("privilege-excess", `
		SELECT 'role ' || quote_ident(r.rolname), format('as a member of another role it may %s', string_agg(format('%s fence.%I', m.may, c.relname), ', ' ORDER BY c.relname)), 'take it out of that role (\drg in psql shows those that it is in)'
		  FROM pg_catalog.pg_roles r JOIN pg_catalog.pg_class c ON c.relnamespace = 'fence'::regnamespace AND c.relkind = 'r'
		  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		 CROSS JOIN LATERAL (
			SELECT 'write' AS may WHERE c.relname <> 'goose_db_version' AND has_table_privilege(r.oid, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
			UNION ALL SELECT 'read the tokens in' WHERE c.relname = 'lease' AND has_column_privilege(r.oid, c.oid, 'token', 'SELECT')
			UNION ALL SELECT 'read' WHERE c.relname = 'secret' AND has_table_privilege(r.oid, c.oid, 'SELECT')) m
		 WHERE r.rolcanlogin AND NOT r.rolsuper AND has_schema_privilege(r.oid, n.oid, 'USAGE') AND NOT pg_has_role(r.oid, n.nspowner, 'MEMBER') AND NOT pg_has_role(r.oid, c.relowner, 'MEMBER')
		   AND NOT EXISTS (SELECT 1 FROM aclexplode(c.relacl) x WHERE x.grantee IN (0, r.oid) AND (x.privilege_type <> 'SELECT' OR c.relname IN ('lease', 'secret')))
		   AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) y
		                    WHERE t.attrelid = c.oid AND y.grantee IN (0, r.oid) AND (y.privilege_type <> 'SELECT' OR t.attname IN ('token', 'revoked', 'key')))
		 GROUP BY r.rolname ORDER BY 1`); err != nil {
		return err
	}
	// Functions that fence.allow gives to nobody, and the schema itself.
	return v.findEach("privilege-excess", `
		SELECT 'role ' || CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, format('it may call %s', f.oid::regprocedure),
		       format('REVOKE EXECUTE ON FUNCTION %s FROM %s', f.oid::regprocedure, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END)
		  FROM pg_catalog.pg_proc f CROSS JOIN LATERAL aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) a
		 WHERE f.pronamespace = 'fence'::regnamespace AND a.privilege_type = 'EXECUTE' AND a.grantee <> f.proowner
		   AND NOT f.proname = ANY ($1::text[]) AND NOT (a.grantee <> 0 AND f.proname = ANY ($2::text[]))
		UNION ALL
		SELECT 'role ' || CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, 'it may create objects in schema fence',
		       'REVOKE CREATE ON SCHEMA fence FROM ' || CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END
		  FROM pg_catalog.pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a
		 WHERE n.nspname = 'fence' AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
		 ORDER BY 1, 2`, publicFunctions, append(slices.Clone(holderFunctions), auditorFunctions...))
}

// Settings that are made for databases and roles, as those of roleSettings c, s.
const (
	roleSettings = `pg_catalog.pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) c (setting)
		LEFT JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.setrole`
	settingOf = `concat_ws(' in ', CASE WHEN s.setrole <> 0 THEN 'role ' || quote_ident(r.rolname) END, CASE WHEN s.setdatabase <> 0 THEN 'database ' || quote_ident(d.datname) END)`
)

func resetOf(setting string) string {
	return `'ALTER ' || CASE WHEN s.setrole <> 0 THEN 'ROLE ' || quote_ident(r.rolname) || CASE WHEN s.setdatabase <> 0 THEN ' IN DATABASE ' || quote_ident(d.datname) ELSE '' END
		ELSE 'DATABASE ' || quote_ident(d.datname) END || ' RESET ` + setting + `'`
}

// defaults looks at what sessions begin with: what this one did, and what is set for roles and this database.
func (v *verifier) defaults() error {
	for id, setting := range map[string]struct{ name, good, bad string }{
		"isolation-default":  {"default_transaction_isolation", "read committed", ""},
		"synchronous-commit": {"synchronous_commit", "", `'off', 'of', 'false', 'fals', 'fal', 'fa', 'f', 'no', 'n', '0'`}, // as it was written
	} {
		wrong := func(value string) string {
			if setting.bad != "" {
				return "lower(" + value + ") IN (" + setting.bad + ")"
			}
			return "lower(" + value + ") <> '" + setting.good + "'"
		}
		value := `trim(BOTH '"' FROM split_part(c.setting, '=', 2))`
		if err := v.findEach(id, `
			SELECT `+settingOf+`, '`+setting.name+` is ' || `+value+`, `+resetOf(setting.name)+` FROM `+roleSettings+`
			 WHERE lower(split_part(c.setting, '=', 1)) = '`+setting.name+`' AND `+wrong(value)+` AND (s.setdatabase = 0 OR d.datname = current_database())
			UNION ALL
			SELECT 'the server', '`+setting.name+` is ' || p.reset_val || ' in a new session', ''
			  FROM pg_catalog.pg_settings p WHERE p.name = '`+setting.name+`' AND `+wrong("p.reset_val")+` AND p.source NOT IN ('database', 'user', 'database user')
			 ORDER BY 1`); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) fsync() error {
	return v.findEach("fsync-off", `SELECT 'the server', p.name || ' is ' || p.setting, 'ALTER SYSTEM SET ' || p.name || ' = on; SELECT pg_reload_conf()'
		FROM pg_catalog.pg_settings p WHERE p.name IN ('fsync', 'full_page_writes') AND p.setting = 'off' ORDER BY 2`)
}

func (v *verifier) standbys() error {
	var names string
	var connected, synchronous, hidden int
	err := v.q.QueryRow(v.ctx, `SELECT current_setting('synchronous_standby_names'), count(*), count(*) FILTER (WHERE s.sync_state IN ('sync', 'quorum')), count(*) FILTER (WHERE s.sync_state IS NULL)
		FROM pg_catalog.pg_stat_replication s`).Scan(&names, &connected, &synchronous, &hidden)
	if err != nil {
		return err
	}
	switch {
	case names == "" && connected > 0:
		v.find("synchronous-standby", "the server", "", "connected standbys: %d; none of them is synchronous", connected)
	case names != "" && synchronous == 0 && hidden > 0:
		v.cannot("synchronous-missing", "the server", "this role may not see the state of standbys: GRANT pg_read_all_stats")
	case names != "" && synchronous == 0:
		v.find("synchronous-missing", "the server", "", "synchronous_standby_names is %q, and none of them is connected", names)
	}
	return nil
}
