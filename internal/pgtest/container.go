package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const defaultImage = "postgres:17"

func startContainer(ctx context.Context) (_ *Server, err error) {
	image := os.Getenv(EnvImage)
	if image == "" {
		image = defaultImage
	}
	// testcontainers panics where it finds no engine to talk to.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("no Docker engine answers: %v", p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // a first pull takes its time
	defer cancel()
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("postgres"), postgres.WithUsername("postgres"), postgres.WithPassword("writegate"),
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "fsync=off", "-c", "max_connections=200"),
	)
	stop := func() error { return testcontainers.TerminateContainer(container) }
	if err != nil {
		return nil, errors.Join(fmt.Errorf("a container of image %s: %w", image, err), stop())
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
