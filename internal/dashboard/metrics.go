package dashboard

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/writegate/writegate/internal/audit"
)

// The metrics. docs/alerting.md has rules for them.
var (
	up = prometheus.NewDesc("writegate_up", "Whether the database could be read: without it there are no other metrics but those of the checks.", nil, nil)

	schemaVersion = prometheus.NewDesc("writegate_schema_version", "Version of schema fence.", nil, nil)
	leases        = prometheus.NewDesc("writegate_leases", "Leases by state: held, overdue (expired, not released, and nobody has followed), free.", []string{"state"}, nil)
	leasesLate    = prometheus.NewDesc("writegate_leases_late", "Leases that are held, and of whose TTL two thirds have gone by without a renewal.", nil, nil)
	oldestOverdue = prometheus.NewDesc("writegate_lease_overdue_seconds_max", "For how long the lease that has been overdue the longest has been, 0 if none is.", nil, nil)

	rejections    = prometheus.NewDesc("writegate_rejections_total", "Protected writes that were refused, by table and reason; what has been pruned included.", []string{"table", "reason"}, nil)
	lawful        = prometheus.NewDesc("writegate_rejections_lawful_total", "Of those, refusals of lawful holders: wake somebody.", []string{"table", "reason"}, nil)
	lastRejection = prometheus.NewDesc("writegate_rejection_last_timestamp_seconds", "When a write was last refused, by table and reason, in seconds since 1970.", []string{"table", "reason"}, nil)
	losses        = prometheus.NewDesc("writegate_audit_losses_total", "Refusals that could not be recorded.", nil, nil)
	guardRefused  = prometheus.NewDesc("writegate_guard_refused_total", "Writes that guards refused.", nil, nil)
	unfenced      = prometheus.NewDesc("writegate_unfenced_writes_total", "Writes that guards let pass and would refuse, or were told to count.", nil, nil)

	lastFence = prometheus.NewDesc("writegate_fence_last", "The last fence that was drawn.", nil, nil)
	headroom  = prometheus.NewDesc("writegate_fence_headroom_ratio", "Which part of all fences is left, from 1 to 0.", nil, nil)

	findings    = prometheus.NewDesc("writegate_verify_findings", "What the checks have found and no baseline accepts, by id and severity. Of leases that are overdue or late 100 at most are found: writegate_leases counts them all.", []string{"id", "severity"}, nil)
	notChecked  = prometheus.NewDesc("writegate_verify_unchecked", "1 for each check that could not run.", []string{"id"}, nil)
	verifyFails = prometheus.NewDesc("writegate_verify_failed", "1 if the checks could not run at all the last time.", nil, nil)
	verifyRun   = prometheus.NewDesc("writegate_verify_last_run_timestamp_seconds", "When the checks ran last, in seconds since 1970.", nil, nil)
)

// collector reads the database when it is asked.
type collector struct{ d *Dashboard }

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		up, schemaVersion, leases, leasesLate, oldestOverdue, rejections, lawful, lastRejection, losses, guardRefused, unfenced, lastFence, headroom,
		findings, notChecked, verifyFails, verifyRun,
	} {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- metric(d, prometheus.GaugeValue, v, labels)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- metric(d, prometheus.CounterValue, float64(v), labels)
	}
	v, at, err := c.d.verification()
	if !at.IsZero() {
		gauge(verifyRun, float64(at.Unix()))
		gauge(verifyFails, oneIf(err != nil))
	}
	if v != nil {
		type kind struct{ id, severity string }
		counts := map[kind]int{}
		for _, f := range v.Open(audit.SeverityInfo) { // what is accepted is no reason for an alert
			counts[kind{f.ID, string(f.Severity)}]++
		}
		for _, id := range v.Checks { // one that finds nothing is 0, and not missing
			if check, ok := audit.CheckByID(id); ok {
				counts[kind{id, string(check.Severity)}] += 0
			}
		}
		for k, n := range counts {
			gauge(findings, float64(n), k.id, k.severity)
		}
		seen := map[string]bool{}
		for _, u := range v.Unchecked {
			if !seen[u.ID] {
				gauge(notChecked, 1, u.ID)
			}
			seen[u.ID] = true
		}
	}
	counts, err := c.d.counts.value(context.Background()) // bounded by the time for reading the database
	gauge(up, oneIf(err == nil))
	if err != nil {
		c.d.cfg.Logger.Error("the database cannot be read", "error", err)
		return
	}
	gauge(schemaVersion, float64(counts.Schema))
	gauge(leases, float64(counts.Leases.Held), "held")
	gauge(leases, float64(counts.Leases.Overdue), "overdue")
	gauge(leases, float64(counts.Leases.Free), "free")
	gauge(leasesLate, float64(counts.Late))
	gauge(oldestOverdue, counts.OldestOverdue)
	for _, r := range counts.Refusals {
		counter(rejections, r.Count, r.Table, r.Reason)
		counter(lawful, r.Lawful, r.Table, r.Reason)
		gauge(lastRejection, float64(r.LastAt.UnixMilli())/1000, r.Table, r.Reason)
	}
	counter(losses, counts.Losses)
	counter(guardRefused, counts.GuardRefused)
	counter(unfenced, counts.GuardObserved)
	gauge(lastFence, float64(counts.LastFence))
	gauge(headroom, 1-float64(counts.LastFence)/float64(audit.FenceCeiling))
}

func metric(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels []string) prometheus.Metric {
	for i := range labels {
		labels[i] = escapeInvalid(labels[i])
	}
	return prometheus.MustNewConstMetric(d, kind, v, labels...)
}

// escapeInvalid writes what is no UTF-8, for a database may be in no encoding at all, so that names that differ stay apart: the
// same metric twice would leave none at all.
func escapeInvalid(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 {
			fmt.Fprintf(&b, `\x%02x`, s[0])
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
