-- What writes other than updates need: floors under deleted rows, requests that were applied, pinned transactions.

-- +goose Up
-- A deleted row takes its fence along. Its tombstone keeps it: nobody below that fence brings the row back. A row is known
-- by two hashes of its key (hash_record_extended with seeds 0 and 1), which are the same for values that are equal, as
-- their types have it, whatever they look like: 1.0 and 1.00, two spellings of an instant, letters that a collation does
-- not tell apart. row_key is for people.
CREATE TABLE fence.tombstone (
    relation   regclass    NOT NULL,
    key_hash   bigint      NOT NULL,
    key_check  bigint      NOT NULL,
    row_key    jsonb       NOT NULL,
    fence      bigint      NOT NULL,
    lease_name text COLLATE "C" NOT NULL,
    deleted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (relation, key_hash, key_check),
    CONSTRAINT tombstone_fence_is_positive CHECK (fence > 0)
);
CREATE INDEX tombstone_deleted_at_idx ON fence.tombstone (deleted_at);
COMMENT ON TABLE fence.tombstone IS 'rows deleted through the gate, and the fence under which each was; see fence.prune()';

-- Requests that were applied, so that a repeat is not. They matter for as long as their term lasts.
CREATE TABLE fence.request (
    fence      bigint      NOT NULL,
    lease_name text COLLATE "C" NOT NULL,
    id         text COLLATE "C" NOT NULL,
    kind       text        NOT NULL,
    relation   regclass    NOT NULL,
    key_hash   bigint      NOT NULL,
    key_check  bigint      NOT NULL,
    returned   text[]      NOT NULL,
    result     jsonb,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (fence, lease_name, id),
    CONSTRAINT request_id_length CHECK (octet_length(id) BETWEEN 1 AND 255)
);
CREATE INDEX request_applied_at_idx ON fence.request (applied_at);
COMMENT ON TABLE fence.request IS 'writes with a request id that were applied, and the columns that they returned; see fence.prune()';

-- Refusals of which only the number is known: the audit could not be written when they happened.
CREATE TABLE fence.audit_loss (
    application_name text        NOT NULL,
    db_user          name        NOT NULL,
    count            bigint      NOT NULL,
    first_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (application_name, db_user)
);
COMMENT ON TABLE fence.audit_loss IS 'refusals that could not be recorded in fence.rejection, as their gates reported them later';

-- fence.floor returns the fence under which the row with this key was last deleted, 0 if it never was, and keeps
-- everybody else who asks waiting until the calling transaction ends. An insert must be above it; a delete takes it
-- once it has locked the row. Reading fence.tombstone in the insert's own snapshot would miss a delete that commits
-- while the insert waits for it.
-- +goose StatementBegin
CREATE FUNCTION fence.floor(relation regclass, key_hash bigint, key_check bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'isolation level %: inserts and deletes of protected rows need READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
    PERFORM pg_advisory_xact_lock(hashint8extended(floor.key_hash, floor.relation::oid::bigint));
    -- A statement of its own, so that it sees what was committed by whoever held the lock.
    RETURN fence.buried(floor.relation, floor.key_hash, floor.key_check);
END $$;
-- +goose StatementEnd

-- fence.buried is fence.floor without the lock: it explains, and decides nothing.
-- +goose StatementBegin
CREATE FUNCTION fence.buried(relation regclass, key_hash bigint, key_check bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_fence bigint;
BEGIN
    SELECT t.fence INTO v_fence FROM fence.tombstone t
     WHERE t.relation = buried.relation AND t.key_hash = buried.key_hash AND t.key_check = buried.key_check;
    RETURN coalesce(v_fence, 0);
END $$;
-- +goose StatementEnd

-- fence.may raises 42501 unless the role that calls the calling function has one of these rights on a protected table.
-- Of a function that runs with its owner's rights, session_user and the setting role tell who calls it.
-- +goose StatementBegin
CREATE FUNCTION fence.may(relation regclass, privileges text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_role name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    -- A right on a few columns will do for what may be given so.
    IF NOT has_table_privilege(v_role, may.relation, may.privileges)
       AND (may.privileges = 'DELETE' OR NOT has_any_column_privilege(v_role, may.relation, replace(may.privileges, ', DELETE', ''))) THEN
        RAISE EXCEPTION 'permission denied for table %', may.relation USING ERRCODE = '42501',
            DETAIL = format('Role %I has none of these rights on it: %s.', v_role, may.privileges);
    END IF;
    IF NOT EXISTS (SELECT 1 FROM fence.protected_table p WHERE p.relation = may.relation) THEN
        RAISE EXCEPTION 'table % is not protected', may.relation USING ERRCODE = '42501';
    END IF;
END $$;
-- +goose StatementEnd

-- fence.bury leaves a tombstone. Call it in the statement that deletes the row, which has asked fence.floor first.
-- +goose StatementBegin
CREATE FUNCTION fence.bury(relation regclass, key_hash bigint, key_check bigint, row_key jsonb, fence bigint, lease_name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM fence.may(bury.relation, 'DELETE');
    INSERT INTO fence.tombstone AS t (relation, key_hash, key_check, row_key, fence, lease_name)
    VALUES (bury.relation, bury.key_hash, bury.key_check, bury.row_key, bury.fence, bury.lease_name)
    ON CONFLICT (relation, key_hash, key_check) DO UPDATE
       SET lease_name = CASE WHEN excluded.fence >= t.fence THEN excluded.lease_name ELSE t.lease_name END,
           fence = greatest(t.fence, excluded.fence), deleted_at = excluded.deleted_at;
    RETURN true;
END $$;
-- +goose StatementEnd

-- fence.request_is_new answers whether a request of this grant has not been applied yet, and keeps a repeat of it
-- waiting until the calling transaction ends.
-- +goose StatementBegin
CREATE FUNCTION fence.request_is_new(lease_name text, fence bigint, id text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_new boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'isolation level %: a write with a request id needs READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended(request_is_new.lease_name || chr(1) || request_is_new.id, request_is_new.fence));
    SELECT NOT EXISTS (SELECT 1 FROM fence.request r
                        WHERE r.fence = request_is_new.fence AND r.lease_name = request_is_new.lease_name
                          AND r.id = request_is_new.id) INTO v_new;
    RETURN v_new;
END $$;
-- +goose StatementEnd

-- fence.request_applied puts a request on record. Call it in the statement that applies it.
-- +goose StatementBegin
CREATE FUNCTION fence.request_applied(
    lease_name text, fence bigint, id text, kind text, relation regclass, key_hash bigint, key_check bigint,
    returned text[], result jsonb
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM fence.may(request_applied.relation, 'INSERT, UPDATE, DELETE');
    INSERT INTO fence.request (fence, lease_name, id, kind, relation, key_hash, key_check, returned, result)
    VALUES (request_applied.fence, request_applied.lease_name, request_applied.id, request_applied.kind,
            request_applied.relation, request_applied.key_hash, request_applied.key_check, request_applied.returned,
            request_applied.result);
    RETURN true;
END $$;
-- +goose StatementEnd

-- fence.request_result returns what was kept of a request that was applied; no row if it was not. What it returned is for
-- roles that may read the table.
-- +goose StatementBegin
CREATE FUNCTION fence.request_result(lease_name text, fence bigint, id text)
RETURNS TABLE (kind text, relation regclass, key_hash bigint, key_check bigint, returned text[], result jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT r.kind, r.relation, r.key_hash, r.key_check, r.returned,
                        CASE WHEN has_any_column_privilege(coalesce(nullif(current_setting('role'), 'none'), session_user)::name, r.relation, 'SELECT')
                             THEN r.result END
      FROM fence.request r
     WHERE r.fence = request_result.fence AND r.lease_name = request_result.lease_name AND r.id = request_result.id;
END $$;
-- +goose StatementEnd

-- fence.no_longer lowers one of the timeouts, for this transaction alone, unless it is shorter already. 0 means none; a setting that
-- this server does not have is left alone.
-- +goose StatementBegin
CREATE FUNCTION fence.no_longer(setting text, milliseconds text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now text := current_setting(no_longer.setting, true);
BEGIN
    IF v_now = '0' OR extract(epoch FROM v_now::interval) * 1000 > no_longer.milliseconds::bigint THEN
        RETURN set_config(no_longer.setting, no_longer.milliseconds, true);
    END IF;
    RETURN v_now;
END $$;
-- +goose StatementEnd

-- fence.pin makes the calling transaction one of this grant's: no newer grant can exist before it ends. It holds the
-- lease as fence.live does, and has the server end a transaction that stands still: statement_timeout,
-- idle_in_transaction_session_timeout and, where there is one, transaction_timeout become what the lease has left,
-- unless they are shorter already, for this transaction alone. So a client that stalls keeps the next holder waiting
-- for a bounded time. Call it first.
--
-- state is as in fence.lease_state; pinned only if it is "held". transaction names the transaction, for asking
-- fence.transaction_fate what became of it when the answer to its COMMIT was lost.
-- +goose StatementBegin
CREATE FUNCTION fence.pin(
    name text, token uuid, fence bigint,
    OUT state text, OUT remaining interval, OUT transaction xid8, OUT timeline text
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_ends timestamptz;
    v_ms   text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fence.live(pin.name, pin.token, pin.fence); -- which raises WG002
    END IF;
    SELECT l.expires_at INTO v_ends FROM fence.live_lease l
     WHERE l.name = pin.name AND l.fence = pin.fence AND l.proof = uuid_hash_extended(pin.token, 0);
    remaining := v_ends - clock_timestamp();
    IF remaining IS NULL OR remaining <= interval '0' THEN
        state := fence.lease_state(pin.name, pin.token, pin.fence);
        IF state = 'held' THEN
            state := 'expired'; -- between one look and the next
        END IF;
        remaining := NULL;
        RETURN;
    END IF;
    state := 'held';
    transaction := pg_current_xact_id();
    BEGIN -- as in fence.timeline; a call of it would cost as much as all the rest
        timeline := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    EXCEPTION WHEN OTHERS THEN
        timeline := NULL;
    END;
    v_ms := ceil(extract(epoch FROM remaining) * 1000)::bigint::text;
    v_ms := concat(fence.no_longer('statement_timeout', v_ms), fence.no_longer('idle_in_transaction_session_timeout', v_ms),
        fence.no_longer('transaction_timeout', v_ms)); -- an assignment, where PERFORM would be a query
END $$;
-- +goose StatementEnd

-- fence.transaction_fate says what became of a transaction that fence.pin has named: committed, aborted, in progress, or
-- unknown, which it is on another timeline, where the number means another transaction if any, and once the server has
-- forgotten it.
-- +goose StatementBegin
CREATE FUNCTION fence.transaction_fate(transaction xid8, timeline text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF transaction_fate.timeline IS DISTINCT FROM fence.timeline() OR transaction_fate.timeline IS NULL THEN
        RETURN 'unknown';
    END IF;
    RETURN coalesce(pg_xact_status(transaction_fate.transaction), 'unknown');
EXCEPTION WHEN invalid_parameter_value THEN -- from another server's future
    RETURN 'unknown';
END $$;
-- +goose StatementEnd

-- fence.record_rejections records many refusals in one statement, and how many were lost since the last one that
-- worked. entries is a JSON array of {table, key, lease, fence, reason, current, holder, times, first_at}; the answers carry each one's
-- place in it, from 1. In a fixed order, so that two that record the same do not lock each other out.
-- +goose StatementBegin
CREATE FUNCTION fence.record_rejections(entries jsonb, lost bigint DEFAULT 0)
RETURNS TABLE (n bigint, verdict text, holder text, current_holder text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    e record;
BEGIN
    FOR e IN
        SELECT x.n, x.entry ->> 'table' AS table_name, x.entry -> 'key' AS row_key, x.entry ->> 'lease' AS lease_name,
               (x.entry ->> 'fence')::bigint AS fence, x.entry ->> 'reason' AS reason,
               (x.entry ->> 'current')::bigint AS current_fence, x.entry ->> 'holder' AS holder,
               coalesce((x.entry ->> 'times')::bigint, 1) AS times, (x.entry ->> 'first_at')::timestamptz AS first_at
          FROM jsonb_array_elements(record_rejections.entries) WITH ORDINALITY x (entry, n)
         ORDER BY 4, 5, 6, 2, 3
    LOOP
        n := e.n;
        SELECT r.verdict, r.holder, r.current_holder INTO verdict, holder, current_holder
          FROM fence.record_rejection(e.table_name, e.row_key, e.lease_name, NULL, e.fence, e.reason, e.current_fence,
                                      e.holder, e.times, e.first_at) r;
        RETURN NEXT;
    END LOOP;
    IF record_rejections.lost > 0 THEN
        INSERT INTO fence.audit_loss AS x (application_name, db_user, count)
        VALUES (current_setting('application_name'), session_user, record_rejections.lost)
        ON CONFLICT (application_name, db_user) DO UPDATE
           SET count = x.count + excluded.count, last_at = excluded.last_at;
    END IF;
END $$;
-- +goose StatementEnd

-- fence.prune deletes tombstones and requests that are older than keep, at most batch of each, and returns how many;
-- call it again until both are 0. A tombstone protects for as long as there is one: keep them for longer than any
-- holder, however badly stuck, can still be about to write. Less than 8 days is refused: a lease may last 7.
-- +goose StatementBegin
CREATE FUNCTION fence.prune(keep interval DEFAULT '30 days', batch integer DEFAULT 10000,
    OUT tombstones bigint, OUT requests bigint)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz := clock_timestamp() - prune.keep;
BEGIN
    IF prune.keep IS NULL OR prune.keep < interval '8 days' THEN
        RAISE EXCEPTION 'keep %: want 8 days or more, which is longer than any lease', coalesce(prune.keep::text, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    IF prune.batch IS NULL OR prune.batch < 1 THEN
        RAISE EXCEPTION 'batch %: want 1 or more', coalesce(prune.batch::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    DELETE FROM fence.tombstone t WHERE t.ctid = ANY (ARRAY(
        SELECT x.ctid FROM fence.tombstone x WHERE x.deleted_at < v_before
         ORDER BY x.deleted_at LIMIT prune.batch FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS tombstones = ROW_COUNT;
    DELETE FROM fence.request r WHERE r.ctid = ANY (ARRAY(
        SELECT x.ctid FROM fence.request x WHERE x.applied_at < v_before
         ORDER BY x.applied_at LIMIT prune.batch FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS requests = ROW_COUNT;
END $$;
-- +goose StatementEnd

-- fence.refuse_down raises WG004 while protected tables hold fences, or there are tombstones of their rows, unless
-- writegate.force_down is on. Every rollback from here on begins with it.
-- +goose StatementBegin
CREATE FUNCTION fence.refuse_down() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_held text;
BEGIN
    IF coalesce(current_setting('writegate.force_down', true), '') <> 'on' THEN
        SELECT string_agg(format('%s (up to %s)', t.relation, t.max_fence), ', ') INTO v_held
          FROM fence.tables_holding_fences() t;
        IF v_held IS NOT NULL THEN
            RAISE EXCEPTION 'protected tables still hold fences: %', v_held USING ERRCODE = 'WG004',
                DETAIL = 'Without this schema fences start again at 2, below those in the tables, which would then refuse every writer.',
                HINT = 'Call fence.unprotect() for tables that need no protection any more, or force it with writegate.force_down = on.';
        END IF;
        SELECT string_agg(format('%s (%s)', t.relation, t.n), ', ') INTO v_held
          FROM (SELECT x.relation, count(*) AS n FROM fence.tombstone x
                  JOIN fence.protected_table p ON p.relation = x.relation GROUP BY 1 ORDER BY 1) t;
        IF v_held IS NOT NULL THEN
            RAISE EXCEPTION 'there are tombstones of deleted rows: %', v_held USING ERRCODE = 'WG004',
                DETAIL = 'Without them a superseded holder can bring those rows back.',
                HINT = 'Call fence.unprotect() for tables that need no protection any more, or force it with writegate.force_down = on.';
        END IF;
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 3 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    fence.floor(regclass, bigint, bigint),
    fence.buried(regclass, bigint, bigint),
    fence.may(regclass, text),
    fence.bury(regclass, bigint, bigint, jsonb, bigint, text),
    fence.request_is_new(text, bigint, text),
    fence.request_applied(text, bigint, text, text, regclass, bigint, bigint, text[], jsonb),
    fence.request_result(text, bigint, text),
    fence.no_longer(text, text),
    fence.pin(text, uuid, bigint),
    fence.transaction_fate(xid8, text),
    fence.record_rejections(jsonb, bigint),
    fence.prune(interval, integer),
    fence.refuse_down()
FROM PUBLIC;

-- +goose Down
-- Refused for what the migrations before this would refuse as well, so that going down by several does not stop half way.
SELECT fence.refuse_down();
DROP FUNCTION fence.refuse_down();
DROP FUNCTION fence.prune(interval, integer);
DROP FUNCTION fence.record_rejections(jsonb, bigint);
DROP FUNCTION fence.transaction_fate(xid8, text);
DROP FUNCTION fence.pin(text, uuid, bigint);
DROP FUNCTION fence.no_longer(text, text);
DROP FUNCTION fence.request_result(text, bigint, text);
DROP FUNCTION fence.request_applied(text, bigint, text, text, regclass, bigint, bigint, text[], jsonb);
DROP FUNCTION fence.request_is_new(text, bigint, text);
DROP FUNCTION fence.bury(regclass, bigint, bigint, jsonb, bigint, text);
DROP FUNCTION fence.may(regclass, text);
DROP FUNCTION fence.floor(regclass, bigint, bigint);
DROP FUNCTION fence.buried(regclass, bigint, bigint);
DROP TABLE fence.audit_loss;
DROP TABLE fence.request;
DROP TABLE fence.tombstone;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 2 $$;
-- +goose StatementEnd
