// Package pgerr tells apart what an error from PostgreSQL says about the statement that got it.
package pgerr

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs of schema fence's own.
const (
	FenceBehind   = "WG001" // the sequence yields fences that are not above those in use
	Isolation     = "WG002" // the function needs READ COMMITTED
	CannotProtect = "WG003"
	FencesHeld    = "WG004" // the schema cannot go while protected tables hold fences
	LeaseOver     = "WG005" // fence.enter: the lease is not this grant's any more
	// Of guards: WG006 stale, WG007 the row's fence would fall, WG008 unfenced, WG010 TRUNCATE; and
	Unproven = "WG009" // the row's fence is raised without proof of holding it
)

// Code returns the SQLSTATE in err, "" if it has none.
func Code(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// SchemaMissing reports whether err comes from calling into a schema fence that is not there, or not that new.
func SchemaMissing(err error) bool {
	switch Code(err) {
	case "3F000", "42883", "42P01", "42703":
		return true
	}
	return false
}

// ReadOnly reports whether the server, or this session, takes no writes: a standby, or a demoted primary.
func ReadOnly(err error) bool {
	return Code(err) == "25006"
}

// LockTimeout reports whether a lock did not come free in the time allowed.
func LockTimeout(err error) bool {
	return Code(err) == "55P03"
}

var fenceFunction = regexp.MustCompile(`(?:view live_lease|function (?:live|dear|enter|lease_state|pin|no_longer|floor|buried|bury|request_\w+|transaction_fate))$`)

// NoSuchFunction reports whether err may come from calling a function of schema fence: those of a protected write's own
// table are told by other codes.
func NoSuchFunction(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	// The message is all that tells whose it is; where it is in another language, only the explanation is missing.
	switch pgErr.Code {
	case "3F000":
		return strings.Contains(pgErr.Message, `"fence"`)
	case "42883":
		return strings.Contains(pgErr.Message, "function fence.")
	case "42501":
		return strings.Contains(pgErr.Message, "schema fence") || fenceFunction.MatchString(pgErr.Message)
	}
	return false
}

// Answered reports whether err is the server's own word that the statement failed and left nothing behind. Otherwise
// the statement may have been carried out: the reply was lost, or the session was ended (class 57P) while a commit
// might already have been on disk.
func Answered(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		severity := pgErr.SeverityUnlocalized // lc_messages translates the other
		if severity == "" {
			severity = pgErr.Severity
		}
		switch pgErr.Code {
		case "57P01", "57P02", "57P03":
			return false
		}
		return severity != "FATAL" && severity != "PANIC"
	}
	// Of another driver's error the code is all there is to go by.
	code := Code(err)
	return len(code) == 5 && code[:2] != "08" && code[:2] != "57" && !EndedIdle(err) || code == "57014"
}

// EndedIdle reports whether the server has ended a transaction because it stood still or took too long; it has rolled
// it back.
func EndedIdle(err error) bool {
	switch Code(err) {
	case "25P03", "25P04":
		return true
	}
	return false
}

// Again reports whether the statement, or the whole transaction, may well pass when it is tried again: it was never sent,
// or lost against a concurrent one.
func Again(err error) bool {
	switch Code(err) {
	case "40001", "40P01", "55P03":
		return true
	}
	var undone rolledBack
	if errors.As(err, &undone) {
		return undone.lost
	}
	return NotSent(err)
}

// NotSent reports whether err says that the statement never left this process, or was never committed.
func NotSent(err error) bool {
	var connectErr *pgconn.ConnectError
	var undone rolledBack
	return safeToRetry(err) || errors.As(err, &connectErr) || errors.As(err, &undone)
}

// safeToRetry is pgconn.SafeToRetry without what that gets wrong: a statement in the simple protocol, a COMMIT among them,
// whose connection is lost while it waits for the answer, ends with the error of a connection that was closed before (pgx
// 5.12, MultiResultReader.NextResult). What was closed when it was taken is marked with BeforeSending.
func safeToRetry(err error) bool {
	var marked notSent
	if errors.As(err, &marked) {
		return true
	}
	return pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
}

// notSent marks an error in pgconn.SafeToRetry's way.
type notSent struct{ error }

func (notSent) SafeToRetry() bool { return true }
func (e notSent) Unwrap() error   { return e.error }

// BeforeSending marks an error that was met before the statement could leave this process.
func BeforeSending(err error) error { return notSent{err} }

// BeforeCommit marks an error of a statement in a transaction of our own, after which there is no commit: whether it
// was answered or not, nothing is written. The server's own answers are marked enough.
func BeforeCommit(err error) error {
	var undone rolledBack
	if Answered(err) || errors.As(err, &undone) {
		return err
	}
	return LostAndRolledBack(err)
}

// RolledBack marks an error that the server did not send, of what is certain not to have been carried out, and would fare
// no better if it were tried again.
func RolledBack(err error) error { return rolledBack{err, false} }

// LostAndRolledBack marks the error of a connection that was lost before what was under way on it could be committed.
func LostAndRolledBack(err error) error { return rolledBack{err, true} }

// rolledBack is not notSent: the statement may well have been run, and must not be repeated without the caller's knowing.
type rolledBack struct {
	error
	lost bool
}

func (e rolledBack) Unwrap() error { return e.error }

// Stale reports whether err says that the connection was dead before the statement could be sent on it, as those of a
// pool are after the server was started again. On another connection the statement may well pass.
func Stale(err error) bool {
	var connectErr *pgconn.ConnectError
	return safeToRetry(err) && !errors.As(err, &connectErr)
}

// Refused reports whether trying again cannot help: the server answered, and would answer the same next time.
func Refused(err error) bool {
	code := Code(err)
	if len(code) != 5 { // none, or none of PostgreSQL's
		return false
	}
	switch code[:2] {
	case "08", // connection
		"40", // rolled back: serialization, deadlock
		"53", // out of resources
		"57", // operator intervention: shutdown, cancel
		"58": // the server's system
		return false
	}
	return code != "55P03"
}

// SchemaVersion is the newest version of schema fence that this program knows; a test compares it with the migrations.
const SchemaVersion = 7

// CheckSchema returns an error that says what to do unless found, the schema's version, is one that a program can work
// with: from the oldest that has what it calls, to one version after the newest that it knows.
func CheckSchema(found, oldest int) error {
	switch {
	case found < oldest:
		return fmt.Errorf("%w: it is at version %d, this program needs %d: run `fencecheck migrate up`", ErrSchema, found, oldest)
	case found > SchemaVersion+1:
		return fmt.Errorf("%w: it is at version %d, this program knows up to %d: update the program", ErrSchema, found, SchemaVersion)
	}
	return nil
}

// ErrSchema says that schema fence is missing, too old, too new, or closed to this role.
var ErrSchema = errors.New("schema fence does not fit this program")

// Misrouted reports whether a statement was run by another session than the one that had prepared it.
func Misrouted(err error) bool {
	switch Code(err) {
	case "26000", "42P05":
		return true
	}
	return false
}

// ExplainSchema says what to do about an error met when calling into schema fence; other errors it returns as they are.
func ExplainSchema(err error, database string) error {
	switch {
	case Misrouted(err):
		return fmt.Errorf("a prepared statement is not known to the session that was to run it, as behind a pooler that pools transactions: "+
			"set pgx's DefaultQueryExecMode to QueryExecModeCacheDescribe or QueryExecModeExec: %w", err)
	case SchemaMissing(err):
		return fmt.Errorf("%w: database %q does not have it, or an older one: run `fencecheck migrate up`: %w", ErrSchema, database, err)
	case Code(err) == "42501":
		return fmt.Errorf("%w: database %q: this role needs USAGE on schema fence, EXECUTE on its functions, and SELECT on fence.protected_table and fence.live_lease to write through a gate: %w", ErrSchema, database, err)
	}
	return err
}

// ExplainParse says what is wrong with a connection string without quoting it: where it cannot be parsed, nobody can tell
// which part of it is the password.
func ExplainParse(err error) error {
	why := "want postgres://user@host:port/database or key=value pairs"
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		blank := *parse
		blank.ConnString = ""
		_, detail, _ := strings.Cut(blank.Error(), ": ")
		detail, _, _ = strings.Cut(detail, " (") // which quotes parts of it
		why = detail + "; " + why
	}
	return fmt.Errorf("the connection string cannot be understood (it is not shown, for it may hold a password): %s", why)
}
