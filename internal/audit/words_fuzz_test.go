package audit_test

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
)

// Text that is shown is one line, and nothing in it is obeyed or turns what stands around it; shown again it stays the same, and
// what was harmless is as it was.
func FuzzPrintable(f *testing.F) {
	for _, seed := range []string{"", "plain", "a\nb\tc\x00", "\x1b[31m", "\u009b31m", "\u202eback", "\u2028\u2029\u0085", "\ufeff\u200b\u061c", "bad\xff", `\u000a`, "שלום", "🏴‍☠️", "\u2066x\u2069"} {
		f.Add(seed, seed)
	}
	f.Fuzz(func(t *testing.T, s, other string) {
		shown := audit.Printable(s)
		require.True(t, utf8.ValidString(shown))
		for _, r := range shown {
			require.False(t, unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || unicode.In(r, unicode.Zl, unicode.Zp), "%q shows %q", s, r)
		}
		require.Equal(t, shown, audit.Printable(shown))
		require.Equal(t, shown+audit.Printable(other), audit.Printable(shown+other))
		if !strings.ContainsFunc(s, func(r rune) bool { return r == utf8.RuneError || !unicode.IsGraphic(r) }) {
			require.Equal(t, s, shown)
		}
	})
}

// A duration that people are shown reads back as the one that it was, as near as it is written, and with its sign.
func FuzzDuration(f *testing.F) {
	for _, seed := range []float64{0, 0.0004, -0.0006, 0.9996, 59.96, 60, -61.5, 86400 * 7, 1e9, 9.3e9, -1e300, math.Inf(1), math.NaN(), math.SmallestNonzeroFloat64} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seconds float64) {
		shown := audit.Duration(seconds)
		if math.IsNaN(seconds) {
			require.Equal(t, "-", shown)
			return
		}
		d, err := time.ParseDuration(shown)
		require.NoError(t, err)
		const most = float64(math.MaxInt64) / 1e9 // of what a Duration can say
		switch {
		case math.Abs(seconds) >= most:
			require.Equal(t, seconds < 0, d < 0, shown)
			require.Greater(t, math.Abs(d.Seconds()), most-2, shown)
		default:
			within := map[bool]float64{true: 0.0006, false: 0.06}[math.Abs(seconds) < 1]
			if math.Abs(seconds) >= 60 {
				within = 0.51
			}
			within += math.Abs(seconds) * 1e-15 * 4
			require.InDelta(t, seconds, d.Seconds(), within, shown)
		}
	})
}

// A time that people are shown reads back as the moment that it was, to the millisecond, wherever it was said.
func FuzzWhen(f *testing.F) {
	f.Add(int64(0), int64(0), 0)
	f.Add(int64(1769842800), int64(999999999), 3600)
	f.Add(int64(-62135596800), int64(1), -43200)
	f.Add(int64(253402300799), int64(5), 50400)
	f.Fuzz(func(t *testing.T, seconds, nanos int64, offset int) {
		const first, last = -62135596800, 253402300799 // years 1 to 9999, which have four digits
		at := time.Unix(first+int64(uint64(seconds)%(last-first+1)), int64(uint64(nanos)%1e9)).In(time.FixedZone("", offset%86400))
		shown := audit.When(at)
		back, err := time.Parse(time.RFC3339, strings.Replace(shown, " ", "T", 1))
		require.NoError(t, err)
		require.True(t, strings.HasSuffix(shown, "Z"), shown)
		require.Equal(t, at.UTC().Truncate(time.Millisecond), back, shown)
	})
}

// What is accepted in a file is accepted when that is read again, and nothing else is; whatever else such a file holds, it is
// refused or means the same when it is written anew.
func FuzzBaseline(f *testing.F) {
	for _, seed := range [][3]string{
		{"app.orders", "accepted on 2026-01-31", "app.orders2"}, {"a\tb", "why\nnot", "a b"}, {" x ", " y ", "x"}, {"", "-", "*"}, {"#", "#", "\ufeff"}, {"bad\xff", "r", "bad\ufffd"},
		{strings.Repeat("o", 70000), "long", "short"}, {"x\u00a0", "\u00a0x\u00a0", "x"}, {"x", "sequence-headroom\t*\tall\n# note\n\nfsync-off\tx\ty\tz\r\n", ""},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, object, reason, other string) {
		if b, err := audit.ReadBaseline(strings.NewReader(reason)); err == nil {
			var text strings.Builder
			require.NoError(t, b.Write(&text))
			again, err := audit.ReadBaseline(strings.NewReader(text.String()))
			require.NoError(t, err)
			for i := range b {
				b[i].Object, b[i].Reason = audit.Printable(b[i].Object), strings.TrimSpace(audit.Printable(b[i].Reason))
				_, ok := audit.CheckByID(b[i].ID)
				require.True(t, ok)
				require.NotEmpty(t, b[i].Reason)
			}
			require.Equal(t, b, again)
		}
		if strings.TrimSpace(reason) == "" || object == "*" {
			return
		}
		found := func(objects ...string) *audit.Verification {
			v := &audit.Verification{Checks: []string{"fsync-off", "role-gone"}}
			for _, o := range objects {
				v.Findings = append(v.Findings, audit.Finding{ID: "fsync-off", Severity: audit.SeverityError, Object: o}, audit.Finding{ID: "role-gone", Object: o + "!"})
			}
			return v
		}
		var text strings.Builder
		require.NoError(t, audit.BaselineOf(found(object), reason).Write(&text))
		b, err := audit.ReadBaseline(strings.NewReader(text.String()))
		require.NoError(t, err)
		v := found(object)
		b.Apply(v)
		require.Empty(t, v.Open(audit.SeverityInfo))
		require.Empty(t, v.Notes)
		v = found(other)
		b.Apply(v)
		require.Equal(t, audit.Printable(other) == audit.Printable(object), len(v.Open(audit.SeverityInfo)) == 0)
	})
}
