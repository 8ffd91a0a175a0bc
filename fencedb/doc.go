// Package fencedb is the gate: it writes rows of protected tables under a fence, and a row refuses a holder that has been
// superseded.
//
// A protected table has a fence column, last_fence, and is registered by `SELECT fence.protect('app.orders')` in one of
// your own migrations. A protected write is one conditional statement, UPDATE … WHERE key AND last_fence < $fence, which
// also stores the fence. Whoever holds the lease next has a higher fence; once that has written the row, no statement of an
// older holder changes it, however late it arrives.
//
//	gate := fencedb.New(pool, fencedb.Config{})
//	orders, err := gate.Table(ctx, "app.orders")
//	outcome, err := orders.Update(ctx, lease, fencedb.Key{"id": 7}, fencedb.Set{"status": "done"})
//
// Beside [Table.Update] there are [Table.Insert], [Table.Upsert], [Table.Delete], [Table.UpdateMany] and [Table.Seal], SQL of
// one's own with [Gate.Exec] and [Gate.Query], and [Table.Classify] for what others have sent. [Gate.InTx] runs a whole
// transaction under the lease; [Table.In] and [Table.InSQL] write in one of the caller's. [NewSQL] makes a gate for
// database/sql. docs/writes.md helps to choose.
//
// # Outcomes
//
// A nil error means [Applied] or [AlreadyApplied]. A refusal is a [WriteError] that is an [ErrStale] or an [ErrLeaseLost]:
// stop, somebody else is at work. An [ErrUnknown] means that the answer was lost: send the same write again, or have
// [Retry] do it. Errors of the database are wrapped and never called a refusal.
//
// # Strengths and rules
//
// [Fenced], the default, compares fences at the row and nothing else. It works with leases that live elsewhere. It leaves
// open that an older holder writes a row that no newer one has written or sealed yet. [Live] closes that: the same
// statement locks the lease, and refuses if it is not this grant's any more or has expired. [InTx] does so for a whole
// transaction.
//
// Under rule [Once], the default, a row takes one write of each grant; under [Term] any number.
//
// # Audit
//
// Each refusal is recorded in fence.rejection on a connection of the gate's own, so that it survives the rollback of the
// transaction that was refused; `fencecheck rejections` shows it. The first of its kind is on record when the write returns;
// repeats are counted, and the count is written once a second, by [Gate.Flush] and by [Gate.Close]. A refusal that could not
// be recorded is still a refusal: WriteError.AuditErr says so, and [Gate.Unrecorded] counts.
//
// A role other than the schema's owner needs the grants that the README lists, and the rights on its own tables that it
// needs anyway.
package fencedb
