// Package pgerr tells apart what an error from PostgreSQL says about the statement that got it.
package pgerr

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs of schema fence's own.
const (
	FenceBehind   = "WG001" // the sequence yields fences that are not above those in use
	Isolation     = "WG002" // the function needs READ COMMITTED
	CannotProtect = "WG003"
	FencesHeld    = "WG004" // the schema cannot go while protected tables hold fences
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

// Answered reports whether err is the server's own word that the statement failed and left nothing behind. Otherwise
// the statement may have been carried out: the reply was lost, or the session was ended (class 57P) while a commit
// might already have been on disk.
func Answered(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Severity != "FATAL" && pgErr.Severity != "PANIC"
}

// NotSent reports whether err says that the statement never left this process.
func NotSent(err error) bool {
	var connectErr *pgconn.ConnectError
	return pgconn.SafeToRetry(err) || errors.As(err, &connectErr)
}

// Stale reports whether err says that the connection was dead before the statement could be sent on it, as those of a
// pool are after the server was started again. On another connection the statement may well pass.
func Stale(err error) bool {
	var connectErr *pgconn.ConnectError
	return pgconn.SafeToRetry(err) && !errors.As(err, &connectErr)
}

// Refused reports whether trying again cannot help: the server answered, and would answer the same next time.
func Refused(err error) bool {
	code := Code(err)
	if code == "" {
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
const SchemaVersion = 2

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

// ExplainSchema says what to do about an error met when calling into schema fence; other errors it returns as they are.
func ExplainSchema(err error, database string) error {
	switch {
	case SchemaMissing(err):
		return fmt.Errorf("%w: database %q does not have it, or an older one: run `fencecheck migrate up`: %w", ErrSchema, database, err)
	case Code(err) == "42501":
		return fmt.Errorf("%w: database %q: this role needs USAGE on schema fence and EXECUTE on its functions: %w", ErrSchema, database, err)
	}
	return err
}
