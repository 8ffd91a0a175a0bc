package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net"
	neturl "net/url"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// fuzzConn is one connection for all of a target's inputs.
func fuzzConn(f *testing.F) *pgx.Conn {
	f.Helper()
	cfg := pgtest.NewEmpty(f)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	cfg.RuntimeParams["timezone"] = "Asia/Kathmandu" // what has no offset would be this one's
	return pgtest.Conn(f, cfg)
}

// A time on the command line is the moment that the server takes it for, and never depends on where one is; how long ago is a length
// that the server agrees with, too.
func FuzzWindow(f *testing.F) {
	for _, seed := range [][2]string{
		{"", ""}, {"24h", "1h"}, {"7d", "0d"}, {"65535d", ""}, {"65536d", ""}, {"1h", "24h"}, {"-1h", ""}, {"1.5h", "90s"}, {"1d12h", ""}, {"2026-01-31T08:00:00Z", "2026-01-31T08:00:00+01:00"},
		{"2026-01-31 08:00:00.123456789-03:30", "2026-01-31 08:00+14:00"}, {"2026-01-31T08:00Z", "9999-12-31T23:59:59.9999999Z"}, {"0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"}, {"", "0001-01-01T00:00:00Z"},
		{"0000-12-31T00:00:00Z", ""}, {"2026-02-29T00:00:00Z", ""}, {"2026-01-31T08:00:00", "now"}, {"2026-01-31T08:00:00,5Z", ""}, {"2026-01-31T24:00:00Z", ""}, {"2026-01-31T23:59:60Z", ""}, {"292y", "2562047h47m16.854775807s"},
		{"2026-01-31T08:00:00+24:00", "\u00b5s"}, {"9µs", "9us"},
	} {
		f.Add(seed[0], seed[1])
	}
	ctx := context.Background()
	conn := fuzzConn(f)
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, since, until string) {
		w := window{since, until}
		from, to, err := w.at(now)
		if err != nil {
			var usage usageError
			require.ErrorAs(t, err, &usage)
			return
		}
		require.Equal(t, since == "", from.IsZero(), "no limit is none that was asked for")
		require.Equal(t, until == "", to.IsZero())
		if since != "" && until != "" {
			require.True(t, from.Before(to))
		}
		for text, at := range map[string]time.Time{since: from, until: to} {
			if text == "" {
				continue
			}
			again, err := parseTime("--x", at.Format(time.RFC3339Nano), now)
			if at.Year() > 0 && at.Year() < 10000 {
				require.NoError(t, err)
				require.True(t, at.Equal(again), text)
			}
			// Whatever the server knows of it, it knows the same.
			var there time.Time
			var ago age
			if ago.Set(text) == nil {
				var again age
				require.NoError(t, again.Set(ago.String()), "what is shown can be given")
				require.Equal(t, ago, again)
				require.True(t, at.Equal(now.Add(-time.Duration(ago))))
				var seconds float64
				require.NoError(t, conn.QueryRow(ctx, `SELECT extract(epoch FROM $1::text::interval)::float8`, ago.interval()).Scan(&seconds))
				require.InEpsilon(t, 1+time.Duration(ago).Seconds(), 1+seconds, 1e-6)
			} else if conn.QueryRow(ctx, `SELECT $1::text::timestamptz`, text).Scan(&there) == nil {
				require.Less(t, math.Abs(float64(at.Sub(there))), float64(2*time.Microsecond), "%q is %v here and %v there", text, at, there)
			}
		}
	})
}

// secret is in every password; nobody may be shown it.
const secret = "hunter2hunter2"

var dsnForms = []string{
	"postgres://u:%s@127.0.0.1:1/db", "postgresql://u:%s@h1:1,h2:2/db?sslmode=disable", "postgres://u:%s@/db?host=/tmp", "postgres://127.0.0.1:1/db?user=u&password=%s", "postgres://u:%s@[::1]:1",
	"postgres://u:%s@h", "postgres://u:%s@h/db?nonsense=1", "postgres://u:%s@h/db?sslmode=nonsense", "postgres://u:%s@h:port/db", "postgres:/u:%s@h/db", "POSTGRES://u:%s@h/db", " postgres://u:%s@h/db", "http://u:%s@h/db",
	"u:%s@h/db", "host=127.0.0.1 port=1 user=u password=%s dbname=db", "host=h password='%s' user=u", "password=%s", "host=h password=%s port=x", "host=h password = '%s'sslmode=off", "password='%s", "host=h password=%s pool_max_conns=x",
	"postgres://u:%s@h/db?pool_max_conns=x", "postgres://u:%s@h/db?connect_timeout=x", "postgres://u:%s@h/%%zz", "postgres://u:%s@h/db?sslpassword=%s", "postgres://u:%s@h/db?sslrootcert=/nowhere", "host=h passwd=x password=%s",
}

// Whatever form the database's address has, and whatever is wrong with it, no part of the password is in what fencecheck says of it.
func FuzzPassword(f *testing.F) {
	for i := range dsnForms {
		for _, seed := range [][2]string{{"", ""}, {"/", "/"}, {"1/", "x"}, {"?", "?"}, {"1?", "=x"}, {"#", "#"}, {"@", "@"}, {":", ":"}, {"%", "%zz"}, {"p,", ",q"}, {"[", "]"}, {"1/x?user=", ""}, {"\\", "\\"}, {"é\n", "=\x7f"}, {"a=b&", "&c=d"}} {
			f.Add(uint8(i), seed[0], seed[1], false)
		}
		f.Add(uint8(i), "p/?#@: '", "%&=", true)
	}
	refuse := errors.New("refused")
	f.Fuzz(func(t *testing.T, which uint8, before, after string, escaped bool) {
		form := dsnForms[int(which)%len(dsnForms)]
		password := before + secret + after
		switch {
		case escaped && strings.Contains(form, "://"):
			password = neturl.QueryEscape(password)
		case escaped:
			password = strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password)
			if !strings.Contains(form, "'%s") {
				password = "'" + password + "'"
			}
		case !strings.Contains(form, "://") && !strings.Contains(form, ":%s@"):
			// What ends the password where it stands makes the rest of it something else, by anybody's reading.
			if strings.ContainsAny(before, " \t\r\n\v\f'\\") {
				return
			}
		case strings.Contains(form, "&password=%s") && strings.ContainsAny(before, "&;"):
			return
		}
		dsn := strings.ReplaceAll(strings.ReplaceAll(form, "%s", password), "%%", "%")
		a := &app{databaseURL: dsn}
		said := func(text string) {
			require.NotContains(t, strings.ToLower(text), secret, "of %q", dsn)
		}
		cfg, err := a.connConfig()
		if err != nil {
			var usage usageError
			require.ErrorAs(t, err, &usage)
			said(lines(err))
			return
		}
		for name, value := range cfg.RuntimeParams { // of which the server says that it does not know them
			said(name)
			if name != "options" && !strings.Contains(form, "&password=") {
				said(value)
			}
		}
		said(serverName(cfg))
		said(cfg.Database)
		cfg.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil }
		cfg.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, refuse }
		_, err = pgx.ConnectConfig(context.Background(), cfg)
		require.ErrorIs(t, err, refuse)
		said(lines(a.explainConnect(err)))
		said(fmt.Sprintf("%+v", err))
	})
}

// What is shown as SQL is run as it is shown, and is the text that was given, whatever the server makes of backslashes.
func FuzzLiteral(f *testing.F) {
	for _, seed := range []string{"", "it's", `\`, `\'`, `'\''; DROP TABLE x; --`, "E'", "日本", "$$", "\x01", "nul\x00", "bad\xff"} {
		f.Add(seed)
	}
	ctx := context.Background()
	conn := fuzzConn(f)
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return
		}
		for _, standard := range []string{"on", "off"} {
			_, err := conn.Exec(ctx, "SET standard_conforming_strings = "+standard)
			require.NoError(t, err)
			var back string
			require.NoError(t, conn.QueryRow(ctx, "SELECT "+literal(text)).Scan(&back))
			require.Equal(t, text, back)
		}
		if short := cut(text, 63); short != text {
			require.True(t, strings.HasPrefix(text, short) && len(short) > 63-utf8.UTFMax && len(short) <= 63 && utf8.ValidString(short), "%q", short)
		} else {
			require.LessOrEqual(t, len(text), 63)
		}
	})
}

// A key that is asked for is to the server what it is here, or an error; and what is no object here is none there.
func FuzzKeyFilter(f *testing.F) {
	for _, seed := range []string{
		`{"id": 7}`, `{"id":9007199254740993}`, `{"a":1,"a":2}`, `{}`, `[]`, `null`, `7`, `{"a":{"b":[1,null,true,"x"]}}`, `{"a":"\ud800"}`, `{"a":"\u0000"}`, `{"a":1e400000}`, `{"a":-0.0}`, `{"a":1.10}`,
		`{"a":"é\u00e9\ud83d\ude00"}`, "{\"a\":\"bad\xff\"}", "{\"a\":\"\x01\"}", `{"a":1} x`, ` {"a" : 1 } `, `{'a':1}`, `{"":""}`, `{"a":01}`, "{\"a\":\x00}", `{"a":NaN}`,
	} {
		f.Add(seed, 7)
	}
	f.Add(`{"a":1}`, -1)
	f.Add(`{"a":1}`, math.MaxInt)
	ctx := context.Background()
	conn := fuzzConn(f)
	f.Fuzz(func(t *testing.T, key string, limit int) {
		r := rejectionFlags{}
		r.Key = key
		err := r.check()
		var text string
		there := conn.QueryRow(ctx, `SELECT CASE jsonb_typeof($1::text::jsonb) WHEN 'object' THEN $1::text::jsonb::text ELSE '{}' END`, key).Scan(&text)
		require.False(t, conn.IsClosed())
		parse := func(text string) (v map[string]any) {
			d := json.NewDecoder(strings.NewReader(text))
			d.UseNumber()
			require.NoError(t, d.Decode(&v))
			return v
		}
		switch {
		case key == "":
			require.NoError(t, err, "no filter")
		case err != nil && there == nil:
			// Of numbers the server knows larger ones.
			if v := parse(text); len(v) > 0 {
				require.ErrorContains(t, json.Unmarshal([]byte(key), &v), "into Go value of type float64")
			}
		case err == nil && there == nil:
			require.Equal(t, plainNumbers(parse(key)), plainNumbers(parse(text)))
		}
		r = rejectionFlags{}
		r.Limit = limit
		require.Equal(t, limit >= 0 && limit < math.MaxInt, r.check() == nil, "one more can be asked for, to see whether there is")
	})
}

// plainNumbers has numbers by their value: how they are written is not kept.
func plainNumbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = plainNumbers(v[k])
		}
	case []any:
		for i := range v {
			v[i] = plainNumbers(v[i])
		}
	case json.Number:
		if n, ok := new(big.Rat).SetString(v.String()); ok {
			return n.RatString()
		}
	}
	return v
}
