package audit

import (
	_ "embed"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// functionsText is what the functions of schema fence are, once our migrations have been applied: a line for each, with its
// signature and a hash of its body, and of how it runs. The first line is the schema's version. A test writes it, and compares it.
//
//go:embed functions.txt
var functionsText string

// FunctionsSQL lists the functions of schema fence as functions.txt does, without the copies of guards for other columns.
const FunctionsSQL = `
SELECT f.oid::regprocedure::text, md5(concat_ws(chr(1), f.prosrc, f.prosecdef, f.provolatile, f.proisstrict, f.prokind, l.lanname, array_to_string(f.proconfig, ',')))
  FROM pg_catalog.pg_proc f JOIN pg_catalog.pg_language l ON l.oid = f.prolang
 WHERE f.pronamespace = 'fence'::regnamespace AND f.proname !~ '^guard(_rekey)?_[0-9a-f]{32}$'
 ORDER BY f.oid::regprocedure::text COLLATE "C"`

// knownFunctions are those of functions.txt, and the version that they are of.
func knownFunctions() (version int, hashes map[string]string) {
	hashes = map[string]string{}
	first, rest, _ := strings.Cut(functionsText, "\n")
	version, _ = strconv.Atoi(first)
	for line := range strings.Lines(rest) {
		if signature, hash, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			hashes[signature] = hash
		}
	}
	return version, hashes
}

func (v *verifier) functions() error {
	version, want := knownFunctions()
	if v.version != version {
		return fmt.Errorf("this program knows the functions of version %d alone, and the schema is at %d: %w", version, v.version, pgerr.ErrSchema)
	}
	rows, err := v.q.Query(v.ctx, FunctionsSQL)
	if err != nil {
		return err
	}
	var signature, hash string
	_, err = pgx.ForEachRow(rows, []any{&signature, &hash}, func() error {
		if known, ok := want[signature]; !ok {
			v.find("schema-changed", signature, "DROP FUNCTION "+signature, "it is none of ours")
		} else if known != hash {
			v.find("schema-changed", signature, "", "it is not as the migrations make it")
		}
		delete(want, signature)
		return nil
	})
	if err != nil {
		return err
	}
	for signature := range want {
		v.find("schema-changed", signature, "", "it is missing")
	}
	return nil
}
