package pgerr_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgerr"
	"github.com/writegate/writegate/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// coded is another driver's error, of which the code is all that is known.
type coded string

func (e coded) Error() string    { return string(e) }
func (e coded) SQLState() string { return string(e) }

var five = regexp.MustCompile(`^[0-9A-Z]{5}$`)

// What the server has answered a statement with, while the session lived on, is told from what may have been carried out; knowing less
// of an error never makes one bolder; and no error is both certain not to have been sent and answered.
func FuzzClassification(f *testing.F) {
	for _, code := range []string{
		"00000", "01000", "08006", "08P01", "22023", "23505", "25006", "25P03", "25P04", "26000", "3F000", "40001", "40003", "40P01", "42501", "42883", "42P01", "42P05", "53300",
		"55P03", "57014", "57P01", "57P02", "57P03", "57P04", "57P05", "58030", "WG001", "WG010", "XX000", "P0001", "", "x", "0800", "日本", "080061",
	} {
		f.Add(code, "ERROR", "function fence.live(text) does not exist")
		f.Add(code, "FATAL", `permission denied for schema fence`)
		f.Add(code, "PANIC", "permission denied for function live")
	}
	ctx := context.Background()
	cfg := pgtest.NewEmpty(f)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn := pgtest.Conn(f, cfg)
	f.Fuzz(func(t *testing.T, code, severity, message string) {
		classify := func(err error) {
			require.Equal(t, pgerr.Refused(err) && pgerr.Again(err), false, "what cannot help, may help: %v", err)
			require.False(t, pgerr.Stale(err) && !pgerr.NotSent(err), "%v", err)
			if pgerr.Answered(err) {
				require.False(t, pgerr.NotSent(err), "answered and not sent: %v", err)
			}
			// Where no commit follows, all is told apart: it was answered, or it is not written.
			before := pgerr.BeforeCommit(err)
			require.True(t, pgerr.Answered(before) || pgerr.NotSent(before), "%v", err)
			require.Equal(t, pgerr.Code(err), pgerr.Code(before))
			require.True(t, pgerr.NotSent(pgerr.RolledBack(err)) && pgerr.NotSent(pgerr.BeforeSending(err)))
			require.False(t, pgerr.Stale(pgerr.RolledBack(err)), "what may have been run is not repeated behind one's back")
			explained := pgerr.ExplainSchema(err, "db")
			require.ErrorIs(t, explained, err)
			require.Equal(t, pgerr.Code(err), pgerr.Code(explained))
			if pgerr.NoSuchFunction(err) {
				require.ErrorIs(t, explained, pgerr.ErrSchema)
			}
		}
		pg := &pgconn.PgError{Code: code, Severity: severity, SeverityUnlocalized: severity, Message: message}
		for _, err := range []error{pg, fmt.Errorf("while writing: %w", pg), errors.Join(errors.New(message), pg), coded(code), errors.New(message)} {
			classify(err)
		}
		if severity == "FATAL" || severity == "PANIC" {
			require.False(t, pgerr.Answered(pg), "a session that was ended may have committed before")
		}
		localized := *pg
		localized.Severity = "FEHLER"
		require.Equal(t, pgerr.Answered(pg), severity != "" && pgerr.Answered(&localized) || severity == "" && pgerr.Answered(pg), "the language of messages")
		if pgerr.Answered(coded(code)) && severity == "ERROR" {
			require.True(t, pgerr.Answered(pg))
		}
		// As the server sends it.
		if !five.MatchString(code) || code == "00000" || strings.HasSuffix(code, "000") {
			return // no code that can be raised; a class alone is none to raise
		}
		_, err := conn.Exec(ctx, `DO $do$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '`+code+`'; END $do$`)
		require.False(t, conn.IsClosed())
		require.Equal(t, code, pgerr.Code(err))
		classify(err)
		require.Equal(t, code != "57P01" && code != "57P02" && code != "57P03", pgerr.Answered(err), "it was answered, but for what says that the session ends")
		require.False(t, pgerr.Stale(err))
	})
}
