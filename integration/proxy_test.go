package integration

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// link is a TCP connection to the database that can be disturbed.
type link struct {
	t     *testing.T
	proxy *toxiproxy.Proxy
	cfg   *pgx.ConnConfig // through it
}

// newLink returns an undisturbed link to the bed's database.
func newLink(b *bed, server *pgtest.Server) *link {
	b.t.Helper()
	direct := server.TCP(b.cfg.Database)
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	proxy := toxiproxy.NewProxy(api, "postgres", "127.0.0.1:0", net.JoinHostPort(direct.Host, strconv.Itoa(int(direct.Port))))
	require.NoError(b.t, proxy.Start())
	b.t.Cleanup(proxy.Stop)
	cfg := direct.Copy()
	host, port, err := net.SplitHostPort(proxy.Listen)
	require.NoError(b.t, err)
	n, err := strconv.ParseUint(port, 10, 16)
	require.NoError(b.t, err)
	cfg.Host, cfg.Port, cfg.Fallbacks = host, uint16(n), nil
	return &link{b.t, proxy, cfg}
}

func (l *link) pool(configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	return pgtest.Pool(l.t, l.cfg, configure...)
}

// toxic adds one of toxiproxy's; a timeout of 0 is for ever for one, and at once for another.
func (l *link) toxic(name, kind, stream string) {
	l.t.Helper()
	_, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(
		fmt.Sprintf(`{"name":%q,"type":%q,"stream":%q,"attributes":{"timeout":0}}`, name, kind, stream)))
	require.NoError(l.t, err)
}

// loseReplies lets requests through, and none of their answers.
func (l *link) loseReplies() { l.toxic("replies", "timeout", "downstream") }

// halfOpen lets nothing through, either way, and closes nothing.
func (l *link) halfOpen() {
	l.toxic("replies", "timeout", "downstream")
	l.toxic("requests", "timeout", "upstream")
}

// reset answers whatever is sent with a TCP reset.
func (l *link) reset() { l.toxic("reset", "reset_peer", "upstream") }

// refuse takes no connection any more, and ends those that there are.
func (l *link) refuse() { l.proxy.Stop() }

// mend makes the link as it was; connections that were disturbed are not brought back.
func (l *link) mend() {
	l.proxy.Toxics.ResetToxics(context.Background())
	if !l.proxy.Enabled {
		require.NoError(l.t, l.proxy.Start())
	}
}
