package audit

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// known answers what openState asks the database for: its name, and the epoch of its fences.
type known struct {
	name  string
	epoch int64
}

func (known) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("not asked for")
}
func (k known) QueryRow(context.Context, string, ...any) pgx.Row { return k }
func (k known) Scan(dest ...any) error {
	*dest[0].(*string), *dest[1].(*int64) = k.name, k.epoch
	return nil
}

// Whatever stands in the file of a scan, it is refused, or the scan begins anew, or it goes on with what can have been seen; and
// what a scan has noted itself is what it goes on with.
func FuzzScanState(f *testing.F) {
	for _, seed := range []string{
		`{"database":"d","sample":5,"epoch":1,"tables":{"app.t":{"file":7,"next":64,"read":64,"max":8,"null":1,"negative":2,"unknown":1,"example":"6 at (0,1)"}}}`,
		`{"database":"d","sample":5,"epoch":1,"tables":{"app.t":null,"":{}}}`, `{"database":"d","sample":5,"epoch":1,"tables":{"app.t":{"next":-5}}}`,
		`{"database":"e","sample":5,"epoch":1,"tables":{}}`, `{"database":"d","sample":5,"epoch":2,"tables":{"app.t":{"next":3}}}`, `{"database":"d","sample":6,"epoch":1}`,
		`{"database":"d","sample":5,"epoch":1,"tables":{"app.t":{"next":1,"null":-1}}}`, `null`, ``, `{`, `[]`, "\x00", `{"database":"d","sample":5,"epoch":1}{}`,
	} {
		f.Add([]byte(seed), "d", int64(1), 5.0)
	}
	f.Fuzz(func(t *testing.T, text []byte, database string, epoch int64, sample float64) {
		if !utf8.ValidString(database) || !(sample >= 0 && sample <= 100) {
			return // no database has such a name, and no scan such a sample
		}
		v := &verifier{ctx: context.Background(), q: known{database, epoch}, opt: VerifyOptions{Scan: ScanLimit{State: filepath.Join(t.TempDir(), "state"), Sample: sample}}}
		state, err := v.openState()
		require.NoError(t, err, "no file")
		require.Empty(t, state.Tables)
		require.NoError(t, os.WriteFile(v.opt.Scan.State, text, 0o600))
		if state, err = v.openState(); err != nil {
			require.ErrorContains(t, err, v.opt.Scan.State)
			return
		}
		require.NotNil(t, state.Tables)
		require.Equal(t, scanState{database, sample, epoch, state.Tables}, *state)
		for name, s := range state.Tables {
			if s != nil {
				require.GreaterOrEqual(t, min(s.Next, s.Read, s.Max, s.Null, s.Negative, s.Unknown), int64(0), name)
			}
		}
		require.Len(t, v.result.Notes, 1, "that it goes on, or why it does not")
		require.NoError(t, v.saveState(state))
		again, err := v.openState()
		require.NoError(t, err)
		require.Equal(t, state, again)
	})
}
