// Package pgtest gives the demo and the tests a throw-away PostgreSQL.
//
// [Start] takes the first of these that is there: the server named by WRITEGATE_TEST_DATABASE_URL; installed server
// binaries; a container. WRITEGATE_TEST_SERVER (url, local or container) asks for one of them and no other.
//
// Nothing that it started outlives the process that started it, however that process ends.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Environment variables that choose the server.
const (
	EnvURL    = "WRITEGATE_TEST_DATABASE_URL" // a server to use; its role needs CREATEDB
	EnvServer = "WRITEGATE_TEST_SERVER"       // url, local or container: that kind only
	EnvImage  = "WRITEGATE_TEST_IMAGE"        // the container's image; default postgres:17
)

// Server is a running PostgreSQL. Its methods are safe for concurrent use.
type Server struct {
	// Kind is url, local or container.
	Kind string
	// Where says it in words, without a password.
	Where string

	admin   *pgx.ConnConfig // a database to create others from
	dsn     *string         // of a borrowed server
	tcpHost string          // where admin names a socket: the address that answers too
	stop    func() error
	keep    func() (string, error)
	files   *files // of a local server
}

// Start finds or starts a server. Call [Server.Stop] when done; a process that dies without doing so leaves nothing
// behind either.
func Start(ctx context.Context) (*Server, error) {
	kind := os.Getenv(EnvServer)
	dsn := os.Getenv(EnvURL)
	if kind == "" && dsn != "" {
		kind = "url"
	}
	switch kind {
	case "url":
		if dsn == "" {
			return nil, fmt.Errorf("%s=url, but %s is not set", EnvServer, EnvURL)
		}
		server, err := Borrow(ctx, dsn)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", EnvURL, err)
		}
		return server, nil
	case "local":
		return startLocal(ctx)
	case "container":
		return startContainer(ctx)
	case "":
	default:
		return nil, fmt.Errorf("%s=%q: want url, local or container", EnvServer, kind)
	}

	server, localErr := startLocal(ctx)
	if !errors.Is(localErr, errNoBinaries) {
		return server, localErr // a server that is there and does not start is a fault to see, not to work around
	}
	server, containerErr := startContainer(ctx)
	if containerErr == nil {
		return server, nil
	}
	return nil, fmt.Errorf("no PostgreSQL to use. Do one of these:\n"+
		"  - install the server (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; "+
		"macOS: brew install postgresql@17)\n"+
		"  - start Docker, which then fetches the image (%s chooses another)\n"+
		"  - set %s to a server on which you may create databases\n"+
		"What was tried: %w; %w", EnvImage, EnvURL, localErr, containerErr)
}

// Config returns how to connect to the given database of this server, as a copy; "" is the one to create others from.
func (s *Server) Config(database string) *pgx.ConnConfig {
	cfg := s.admin.Copy()
	if database != "" {
		cfg.Database = database
	}
	return cfg
}

// TCP is like Config, but never through a Unix socket: for what cannot use one, such as a proxy between.
func (s *Server) TCP(database string) *pgx.ConnConfig {
	cfg := s.Config(database)
	if s.tcpHost != "" {
		cfg.Host = s.tcpHost
	}
	return cfg
}

// URL returns how to connect to the given database, in a form that psql and every driver takes. It carries the password
// where one is needed; show people [Server.PublicURL].
func (s *Server) URL(database string) string {
	if s.dsn == nil {
		return urlOf(s.Config(database), s.admin.Password)
	}
	// The borrowed server's own words, for all in them that we know nothing of, with another database.
	if u, err := url.Parse(*s.dsn); err == nil && strings.HasPrefix(u.Scheme, "postgres") {
		query := u.Query()
		query.Del("dbname")
		query.Del("database")
		u.RawQuery = query.Encode()
		u.Path = "/" + database
		return u.String()
	}
	return strings.TrimSpace(*s.dsn + " dbname=" + database)
}

// PublicURL is URL for people to see: without a password, but for that of a container, which was made for this one time
// and is of no use to anybody later.
func (s *Server) PublicURL(database string) string {
	if s.Kind == "container" {
		return s.URL(database)
	}
	return urlOf(s.Config(database), "")
}

func urlOf(cfg *pgx.ConnConfig, password string) string {
	u := url.URL{Scheme: "postgres", Path: "/" + cfg.Database, User: url.User(cfg.User)}
	query := url.Values{"sslmode": {"disable"}}
	if cfg.TLSConfig != nil {
		query.Set("sslmode", "require")
	}
	if strings.HasPrefix(cfg.Host, "/") {
		query.Set("host", cfg.Host)
		query.Set("port", strconv.Itoa(int(cfg.Port)))
	} else {
		u.Host = net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))
		if password != "" {
			u.User = url.UserPassword(cfg.User, password)
		}
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// Stop ends the server and removes all that it wrote. On a server that was only borrowed (kind url) it does nothing.
func (s *Server) Stop() error {
	return s.stop()
}

// Keep leaves the server running after this process has ended, and returns the shell command that ends it. An error
// that is errors.ErrUnsupported says that this kind of server cannot stay.
func (s *Server) Keep() (howToEnd string, err error) {
	if s.keep == nil {
		return "", fmt.Errorf("a server of kind %s: %w", s.Kind, errors.ErrUnsupported)
	}
	return s.keep()
}

// Borrow uses a server that runs already.
func Borrow(ctx context.Context, dsn string) (*Server, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, pgerr.ExplainParse(err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := conn.Close(ctx); err != nil {
		return nil, err
	}
	return &Server{
		Kind:  "url",
		dsn:   &dsn,
		Where: fmt.Sprintf("the server at %s:%d", cfg.Host, cfg.Port),
		admin: cfg,
		stop:  func() error { return nil },
	}, nil
}
