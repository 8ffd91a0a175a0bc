package clients

import (
	"context"

	"entgo.io/ent/dialect"
)

// inTx has ent write in a transaction that was begun, and entered, before it was asked.
type inTx struct {
	tx     dialect.Tx
	driver dialect.Driver
}

func (d inTx) Exec(ctx context.Context, query string, args, v any) error {
	return d.tx.Exec(ctx, query, args, v)
}

func (d inTx) Query(ctx context.Context, query string, args, v any) error {
	return d.tx.Query(ctx, query, args, v)
}
func (d inTx) Tx(context.Context) (dialect.Tx, error) { return dialect.NopTx(d), nil }
func (d inTx) Close() error                           { return nil }
func (d inTx) Dialect() string                        { return d.driver.Dialect() }
