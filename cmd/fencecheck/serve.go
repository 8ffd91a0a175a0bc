package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/dashboard"
)

// envToken holds the dashboard's token, so that it need not stand on a command line, which every user of the machine can read.
const envToken = "FENCECHECK_TOKEN"

func (a *app) serve() *cobra.Command {
	w := window{since: "24h"}
	var v verifyFlags
	var listen, tokenFile, cert, key, baseline string
	var public, rows bool
	var every, verifyEvery time.Duration
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve a live dashboard, and metrics for Prometheus",
		Long: `serve shows what report shows, live, at /; counters for Prometheus at /metrics; and at /healthz whether the database can be read. It
only reads, and however many browsers ask, the database is asked no more often than every half of --every.

It listens on this machine alone. To let others in, --public has to be given, and a token, in the environment variable ` + envToken + `
or in a file: everybody has to give it, as a bearer token or as the password of basic authentication. /healthz tells everybody
whether the database can be read, and no more. Without --tls-cert and --tls-key the token travels as it is.`,
		Example: `  fencecheck serve
  fencecheck serve --listen 0.0.0.0:8480 --public --token-file /run/secrets/fencecheck`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(w.check(), v.check()); err != nil {
				return usageError{err}
			}
			if every < time.Second {
				return usageError{fmt.Errorf("--every %v: want 1s or more", every)}
			}
			if verifyEvery != 0 && verifyEvery < 10*time.Second {
				return usageError{fmt.Errorf("--verify-every %v: want 0 (never), or 10s or more", verifyEvery)}
			}
			if (cert == "") != (key == "") {
				return usageError{errors.New("--tls-cert and --tls-key go together")}
			}
			accepted, err := readBaseline(baseline)
			if err != nil {
				return err
			}
			token, err := readToken(tokenFile)
			if err != nil {
				return err
			}
			if err := mayListen(cmd.Context(), listen, public, token); err != nil {
				return err
			}
			cfg, err := a.poolConfig()
			if err != nil {
				return err
			}
			cfg.MaxConns = 3 // a page, the counters, the checks
			pool, err := pgxpool.NewWithConfig(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			defer pool.Close()
			database := cfg.ConnConfig.Database
			if _, err := audit.Count(cmd.Context(), audit.Bounded(pool, a.timeout), database); err != nil {
				return a.explainConnect(err) // what cannot work is said at once
			}
			board := dashboard.New(dashboard.Config{
				Survey: func(ctx context.Context, found *audit.Verification) (*audit.Overview, error) {
					opt := audit.SurveyOptions{Server: serverName(cfg.ConnConfig), Verify: found, Timeout: a.timeout, Lanes: 30, Spans: 150, Marks: 60}
					var err error // several may be read at a time
					if opt.Since, _, err = w.resolve(ctx, audit.Bounded(pool, a.timeout)); err != nil {
						return nil, err
					}
					return audit.Survey(ctx, pool, database, opt)
				},
				Count: func(ctx context.Context) (audit.Counters, error) {
					return audit.Count(ctx, audit.Bounded(pool, a.timeout), database)
				},
				Verify: func(ctx context.Context) (*audit.Verification, error) {
					found, err := a.verifyFor(ctx, pool, database, v.VerifyOptions, rows)
					if err == nil {
						accepted.Apply(found)
					}
					return found, err
				},
				VerifyEvery: verifyEvery,
				Program:     "fencecheck " + thisVersion().Version,
				Every:       every,
				Timeout:     2 * time.Minute,
				Token:       token,
				AnyHost:     token != "",
				Logger:      slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)),
			})
			defer board.Close()
			return serveOn(cmd, listen, cert, key, board)
		},
	}
	cmd.Flags().StringVar(&w.since, "since", w.since, "show what happened from this time on (2026-01-31T08:00:00+01:00), or from this long ago (24h)")
	v.addFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:8480", "the address to listen on")
	f.StringVar(&baseline, "baseline", "", "a file of findings that are accepted")
	f.BoolVar(&public, "public", false, "allow an address that others can reach; needs a token")
	f.StringVar(&tokenFile, "token-file", "", "a file with the token (default: the environment variable "+envToken+")")
	f.StringVar(&cert, "tls-cert", "", "the certificate's file, to serve HTTPS")
	f.StringVar(&key, "tls-key", "", "its key's file")
	f.DurationVar(&every, "every", 5*time.Second, "how often a page asks again")
	f.DurationVar(&verifyEvery, "verify-every", 5*time.Minute, "how often to run the checks; 0: never")
	f.BoolVar(&rows, "rows", false, "let the checks read the rows of protected tables too")
	return cmd
}

func readToken(file string) (string, error) {
	token := os.Getenv(envToken)
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", usageError{fmt.Errorf("the token: %w", err)}
		}
		token = strings.TrimSpace(string(text))
		if token == "" {
			return "", usageError{fmt.Errorf("the token: %s is empty", file)}
		}
	}
	if token != "" && len(token) < 16 {
		return "", usageError{errors.New("the token is short, and could be guessed: want 16 characters or more, as from `openssl rand -hex 16`")}
	}
	return token, nil
}

// mayListen refuses an address that others can reach unless that is meant, and there is a token.
func mayListen(ctx context.Context, address string, public bool, token string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return usageError{fmt.Errorf("--listen %q: want host:port: %w", address, err)}
	}
	loopback := host != "" // which is every address of this machine
	if host != "" {
		ips, err := net.DefaultResolver.LookupIPAddr(ctx, host)
		if err != nil {
			return usageError{fmt.Errorf("--listen %q: %w", address, err)}
		}
		for _, ip := range ips {
			loopback = loopback && ip.IP.IsLoopback()
		}
	}
	switch {
	case loopback && !public:
		return nil
	case !public:
		return usageError{fmt.Errorf("--listen %s can be reached by others: --public says that this is meant, and a token is needed", address)}
	case token == "":
		return usageError{fmt.Errorf("--public needs a token: set %s, or give --token-file", envToken)}
	}
	return nil
}

// serveOn serves until it is interrupted, and then lets what is under way end.
func serveOn(cmd *cobra.Command, listen, cert, key string, handler http.Handler) error {
	ctx := cmd.Context()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 1 << 16,
	}
	scheme := "http"
	if cert != "" {
		scheme = "https"
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "serving on %s://%s\n", scheme, listener.Addr()); err != nil {
		return errors.Join(err, listener.Close())
	}
	ended := make(chan error, 1)
	go func() {
		if cert != "" {
			ended <- server.ServeTLS(listener, cert, key)
			return
		}
		ended <- server.Serve(listener)
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = server.Shutdown(stop)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if closed := <-ended; !errors.Is(closed, http.ErrServerClosed) {
		err = errors.Join(err, closed)
	}
	return err
}
