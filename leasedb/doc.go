// Package leasedb holds leases in a PostgreSQL table: the right to do something alone, for a limited time that is
// extended for as long as the holder lives.
//
// Make a [Client] for a database, and either let [Client.Do] do all of it, or acquire, use and release a [Lease]:
//
//	client, err := leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second})
//	err = client.Do(ctx, "monthly-report", func(ctx context.Context, lease *leasedb.Lease) error {
//		// alone, as far as a lease can promise; ctx ends if the lease is lost
//		return nil
//	})
//
// # What a lease promises, and what it does not
//
// The database grants a name to one holder at a time, by its own clock. A holder that crashes blocks the others for at
// most the TTL. But a holder can be stopped (a pause for garbage collection, a suspended machine, a lost network) between
// looking at its lease and writing, and resume when the lease has long been somebody else's. No lease can prevent that.
// So every grant has a fence, a number above those of all earlier grants, and a gate of package fencedb makes the row that is
// written refuse a fence that has been superseded. Hand the [Lease] to the gate; it needs nothing else.
//
// # States
//
// A lease is Active until it is Released by its holder or Lost, and never becomes Active again: after a loss, acquire anew.
// It is Lost when the database says that it is over; when no renewal was confirmed before the deadline, for whatever
// reason, a hanging server included; and when it was held for Config.MaxHold. On a loss its context is cancelled with a
// [LostError] as the cause, and Config.OnLost is called.
//
// The deadline is reckoned from before the newest confirmed request was sent, less a margin, by the fastest of the
// machine's clocks: so the holder lets go before the database does.
//
// # The database
//
// Schema fence has to be there: `fencecheck migrate up`, or package migrations. A client has a few connections of its own,
// made from the configuration of the pool that it is given: two for renewals, which the program's own work can thus not
// starve, and Config.Conns for acquires and releases. It renews all its leases in one statement.
//
// A role other than the schema's owner needs USAGE on schema fence and EXECUTE on fence.acquire, fence.renew and
// fence.release; no rights on the tables.
package leasedb
