package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const defaultImage = "postgres:17"

func startContainer(ctx context.Context) (_ *Server, err error) {
	image := os.Getenv(EnvImage)
	if image == "" {
		image = defaultImage
	}
	tclog.SetDefault(quiet{})
	// testcontainers panics where it finds no engine to talk to.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("no Docker engine answers: %v", p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // a first pull takes its time
	defer cancel()
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("postgres"), postgres.WithUsername("postgres"), postgres.WithPassword(rand.Text()),
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "fsync=off", "-c", "max_connections=200", "-c", "jit=off"),
		// In memory: each test makes a database and drops it, which is hundreds of files.
		testcontainers.WithTmpfs(map[string]string{"/pgtest": ""}), testcontainers.WithEnv(map[string]string{"PGDATA": "/pgtest/data"}),
	)
	stop := func() error { return testcontainers.TerminateContainer(container) }
	if err != nil {
		return nil, errors.Join(fmt.Errorf("a container of image %s: %w", image, err), stop())
	}
	// testcontainers' own janitor removes the container of a process that died; where it is switched off, we do.
	if os.Getenv("TESTCONTAINERS_RYUK_DISABLED") == "true" {
		alive, err := removeWhenWeDie(container.GetContainerID())
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		terminate := stop
		stop = func() error { return errors.Join(terminate(), alive.Close()) }
	}
	dsn, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return &Server{
		Kind:  "container",
		Where: fmt.Sprintf("a throw-away container of image %s at %s:%d", image, cfg.Host, cfg.Port),
		admin: cfg,
		stop:  stop,
	}, nil
}

// quiet keeps testcontainers' progress out of what the demo and the tests say; its errors are returned.
type quiet struct{}

func (quiet) Printf(string, ...any) {}

// removeWhenWeDie has a shell wait until alive is closed, which the end of this process does too, and then remove the
// container if it is still there. The caller has to hold on to alive: what nobody refers to is closed.
func removeWhenWeDie(id string) (alive io.Closer, err error) {
	cmd := exec.Command("/bin/sh", "-c", `cat >/dev/null; exec docker rm -f -v "$1" >/dev/null 2>&1`, "sh", id)
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return pipe, cmd.Start()
}
