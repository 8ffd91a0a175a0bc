package show_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

// SARIF as its schema wants it, with a place, a level and a stable fingerprint for each finding, and what did not run.
func TestSARIF(t *testing.T) {
	v := &audit.Verification{
		Findings:  []audit.Finding{{ID: "fsync-off", Severity: audit.SeverityError, Object: "a table/with %", Finding: "f", Fix: "g"}, {ID: "role-gone", Severity: audit.SeverityInfo, Object: "r", Accepted: "why"}},
		Unchecked: []audit.Unchecked{{ID: "lease-hot", Why: "this is a standby"}},
	}
	var b strings.Builder
	require.NoError(t, show.SARIF(&b, v, "my db", "v1"))
	var s struct {
		Version string
		Runs    []struct {
			Tool struct {
				Driver struct{ Rules []struct{ ID string } }
			}
			Invocations []struct {
				ExecutionSuccessful        bool
				ToolExecutionNotifications []struct{ Message struct{ Text string } }
			}
			Results []struct {
				RuleID              string
				RuleIndex           int
				Level               string
				PartialFingerprints map[string]string
				Suppressions        []any
				Locations           []struct {
					PhysicalLocation struct{ ArtifactLocation struct{ URI string } }
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal([]byte(b.String()), &s))
	require.Equal(t, "2.1.0", s.Version)
	run := s.Runs[0]
	require.Len(t, run.Tool.Driver.Rules, len(audit.Checks()))
	require.False(t, run.Invocations[0].ExecutionSuccessful)
	require.Contains(t, run.Invocations[0].ToolExecutionNotifications[0].Message.Text, "standby")
	require.Len(t, run.Results, 2)
	for _, r := range run.Results {
		require.Equal(t, r.RuleID, run.Tool.Driver.Rules[r.RuleIndex].ID)
	}
	require.Equal(t, "error", run.Results[0].Level)
	require.Equal(t, "postgresql/my%20db/a%20table%2Fwith%20%25", run.Results[0].Locations[0].PhysicalLocation.ArtifactLocation.URI)
	require.NotEqual(t, run.Results[0].PartialFingerprints, run.Results[1].PartialFingerprints)
	require.Len(t, run.Results[1].Suppressions, 1)

	b.Reset()
	require.NoError(t, show.GitHub(&b, v))
	require.Equal(t, "::error title=fencecheck fsync-off::a table/with %25: f. g\n::notice title=fencecheck role-gone::r:  (accepted: why)\n"+
		"::error title=fencecheck lease-hot::could not be checked:  this is a standby\n", b.String())
}
