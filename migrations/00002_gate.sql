-- The gate: which tables are protected, the lease as a write sees it, and the audit of what was refused.

-- +goose Up
CREATE TABLE fence.protected_table (
    relation     regclass PRIMARY KEY,
    fence_column name        NOT NULL DEFAULT 'last_fence',
    rule         text        NOT NULL DEFAULT 'once',
    strength     text        NOT NULL DEFAULT 'fenced',
    high_water   bigint      NOT NULL DEFAULT 0,
    protected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT protected_table_rule CHECK (rule IN ('once', 'term')),
    CONSTRAINT protected_table_strength CHECK (strength IN ('fenced', 'live', 'in_tx'))
);
COMMENT ON TABLE fence.protected_table IS 'tables with a fence column, written through the gate; see fence.protect()';
COMMENT ON COLUMN fence.protected_table.high_water IS
    'the highest fence in the table when it was put on the register: fences that this database may never have granted';

-- A refusal repeated is one row with a count: a zombie in a loop must not fill the disk.
CREATE TABLE fence.rejection (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_name       text        NOT NULL,
    row_key          jsonb       NOT NULL,
    row_key_hash     bytea       NOT NULL,
    lease_name       text COLLATE "C" NOT NULL,
    fence            bigint      NOT NULL,
    reason           text        NOT NULL,
    verdict          text        NOT NULL,
    current_fence    bigint,
    holder           text        NOT NULL DEFAULT '',
    current_holder   text        NOT NULL DEFAULT '',
    count            bigint      NOT NULL DEFAULT 1,
    first_at         timestamptz NOT NULL,
    last_at          timestamptz NOT NULL,
    application_name text        NOT NULL DEFAULT '',
    client_addr      inet,
    db_user          name        NOT NULL DEFAULT session_user,
    CONSTRAINT rejection_reason CHECK (reason IN ('stale', 'expired', 'superseded', 'released', 'wrong_fence', 'no_lease')),
    CONSTRAINT rejection_verdict CHECK (verdict IN ('stale', 'expired', 'lawful', 'unknown')),
    CONSTRAINT rejection_count_is_positive CHECK (count > 0)
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX rejection_identity_idx
    ON fence.rejection (lease_name, fence, reason, table_name, row_key_hash);
CREATE INDEX rejection_last_at_idx ON fence.rejection (last_at, id);
COMMENT ON TABLE fence.rejection IS 'protected writes that were refused, one row for each (table, key, lease, fence, reason)';
COMMENT ON COLUMN fence.rejection.reason IS
    'stale: the row had seen a newer fence; the others: the lease was not this grant''s any more, and why';
COMMENT ON COLUMN fence.rejection.verdict IS
    'stale: a newer grant exists; expired: over, nobody followed; lawful: the holder itself was refused, look into it (the'
    ' source of fences, or a row that is written under two leases); unknown: this database has no such lease';

-- fence.lease_state says what became of a grant, without locking anything:
--   held, expired (nobody followed), released, superseded (a newer grant exists), wrong_fence (the token holds the
--   lease, but under another fence), no_lease.
-- It explains a refusal. It must never decide one: what it read may change before the caller acts on it.
-- +goose StatementBegin
CREATE FUNCTION fence.lease_state(name text, token uuid, fence bigint) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r record;
BEGIN
    SELECT l.fence, l.token, l.expires_at, l.released_at INTO r FROM fence.lease l WHERE l.name = lease_state.name;
    RETURN CASE
        WHEN NOT FOUND OR r.token IS NULL THEN 'no_lease'
        WHEN lease_state.token IS NOT NULL AND r.token <> lease_state.token THEN 'superseded'
        WHEN r.fence > lease_state.fence AND lease_state.token IS NULL THEN 'superseded'
        WHEN r.fence <> lease_state.fence THEN 'wrong_fence'
        WHEN r.released_at IS NOT NULL THEN 'released'
        WHEN r.expires_at <= clock_timestamp() THEN 'expired'
        ELSE 'held'
    END;
END $$;
-- +goose StatementEnd

-- fence.dear is false, and has a price: where a condition has it the planner takes the index, and looks at few rows. A plan that was
-- made while there were next to none, and is kept, would go on looking at all of them. It is never called for a lease that is held.
-- +goose StatementBegin
CREATE FUNCTION fence.dear() RETURNS boolean
LANGUAGE plpgsql VOLATILE COST 1000000 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN false;
END $$;
-- +goose StatementEnd

-- fence.live_lease are the leases that are held, each locked as it is read: FOR KEY SHARE, which makes the next grant (FOR
-- UPDATE) wait until the reader's transaction ends, and lets renewals (FOR NO KEY UPDATE) through. What has changed by the time
-- that the lock is had is looked at anew. So a write may read it in its own WHERE clause; reading fence.lease there, by EXISTS,
-- join or subquery, would look at the statement's snapshot: after a wait for the data row that may be a lease that has long been
-- somebody else's. Whoever reads it has to ask of expires_at again, in what is selected: only there is the clock read after the
-- lock; here it keeps an expired holder's writes from keeping the next one waiting. It needs READ COMMITTED.
-- proof tells the token from another, and not what it is.
CREATE VIEW fence.live_lease AS
SELECT l.name, l.fence, uuid_hash_extended(l.token, 0) AS proof, l.expires_at
  FROM fence.lease l
 WHERE (l.released_at IS NULL OR fence.dear()) AND l.expires_at > clock_timestamp()
   FOR KEY SHARE;
COMMENT ON VIEW fence.live_lease IS 'leases that are held; reading one keeps it from being granted anew until the end of the transaction';

-- fence.live answers whether the grant is the lease's newest and has not expired, and if so keeps it that way until
-- the calling transaction ends. It is fence.live_lease for one's own SQL, and says if the isolation level is not what it needs.
-- +goose StatementBegin
CREATE FUNCTION fence.live(name text, token uuid, fence bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_live boolean;
BEGIN
    -- Under a snapshot that does not move, FOR KEY SHARE may lock a version of the row that is not the newest.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'isolation level %: a live write needs READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED, or write with strength Fenced.';
    END IF;
    SELECT l.expires_at > clock_timestamp() INTO v_live
      FROM fence.live_lease l
     WHERE l.name = live.name AND l.fence = live.fence AND l.proof = uuid_hash_extended(live.token, 0);
    RETURN coalesce(v_live, false);
END $$;
-- +goose StatementEnd

-- fence.record_rejection adds refusals to the audit, or to the count of the row that is there for the same table, key,
-- lease, fence and reason. Call it in a transaction of its own: one that the refused writer rolls back would take the
-- record along. Holders are looked up by fence, if this database has the lease; fences from elsewhere mean nothing here,
-- and given_holder is all that is known of theirs.
-- +goose StatementBegin
CREATE FUNCTION fence.record_rejection(
    table_name text, row_key jsonb, lease_name text, token uuid, fence bigint, reason text, current_fence bigint,
    given_holder text DEFAULT '', times bigint DEFAULT 1, first_at timestamptz DEFAULT NULL,
    OUT verdict text, OUT holder text, OUT current_holder text
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_state text := fence.lease_state(record_rejection.lease_name, NULL, record_rejection.fence);
    v_last  bigint;
BEGIN
    IF record_rejection.times NOT BETWEEN 1 AND 1000000000 THEN
        RAISE EXCEPTION 'times %: want 1 to 1000000000', record_rejection.times USING ERRCODE = '22023';
    END IF;
    SELECT l.fence, l.holder INTO v_last, current_holder FROM fence.lease l WHERE l.name = record_rejection.lease_name;
    verdict := CASE v_state
        WHEN 'superseded' THEN 'stale'
        WHEN 'expired' THEN 'expired'
        WHEN 'released' THEN 'expired'
        -- The lease is free or this very grant's. Refused by a newer fence in the row all the same: the holder the
        -- product exists to serve was turned away. Asked with a fence that is not its own: nobody's lawful write.
        WHEN 'held' THEN CASE WHEN record_rejection.reason = 'stale' THEN 'lawful' ELSE 'stale' END
        WHEN 'wrong_fence' THEN 'stale'
        ELSE 'unknown'
    END;

    IF v_state = 'no_lease' THEN
        current_holder := NULL;
    ELSE
        SELECT t.holder INTO holder FROM fence.term t
         WHERE t.fence = record_rejection.fence AND t.name = record_rejection.lease_name;
        -- The row's newest writer, where its term is known; else whoever has the lease now.
        SELECT t.holder INTO current_holder FROM fence.term t
         WHERE t.fence = coalesce(record_rejection.current_fence, v_last)
           AND t.fence <> record_rejection.fence
        UNION ALL SELECT current_holder WHERE v_last > record_rejection.fence
        LIMIT 1;
    END IF;
    holder := coalesce(holder, record_rejection.given_holder, '');
    current_holder := coalesce(current_holder, '');

    INSERT INTO fence.rejection AS x
           (table_name, row_key, row_key_hash, lease_name, fence, reason, verdict, current_fence, holder,
            current_holder, count, first_at, last_at, application_name, client_addr, db_user)
    VALUES (record_rejection.table_name, record_rejection.row_key,
            sha256(convert_to(record_rejection.row_key::text, 'UTF8')), record_rejection.lease_name,
            record_rejection.fence, record_rejection.reason, verdict, record_rejection.current_fence, holder,
            current_holder, record_rejection.times, coalesce(record_rejection.first_at, v_now), v_now,
            current_setting('application_name'), inet_client_addr(), session_user)
    ON CONFLICT (lease_name, fence, reason, table_name, row_key_hash) DO UPDATE
       SET count = x.count + excluded.count, last_at = greatest(x.last_at, excluded.last_at),
           verdict = CASE WHEN x.verdict = 'lawful' THEN x.verdict ELSE excluded.verdict END,
           current_fence = greatest(x.current_fence, excluded.current_fence),
           current_holder = excluded.current_holder;
END $$;
-- +goose StatementEnd

-- fence.protect makes a table ready for protected writes: it adds the fence column where that is missing (no rewrite:
-- a constant default) and registers the table. Call it in your own migration. Called again it changes rule and strength.
-- It needs ACCESS EXCLUSIVE for a moment and gives up with 55P03 after two seconds rather than let readers queue.
-- What cannot be safe is refused with WG003.
-- +goose StatementBegin
CREATE FUNCTION fence.protect(
    relation regclass, rule text DEFAULT 'once', strength text DEFAULT 'fenced', fence_column name DEFAULT 'last_fence'
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    c       record;
    a       record;
    v_found boolean;
    v_high  bigint := 0;
    v_wait  text := current_setting('lock_timeout');
BEGIN
    IF protect.rule IS NULL OR protect.rule NOT IN ('once', 'term') THEN
        RAISE EXCEPTION 'rule %: want once or term', coalesce(quote_literal(protect.rule), 'NULL') USING ERRCODE = '22023';
    END IF;
    IF protect.strength IS NULL OR protect.strength NOT IN ('fenced', 'live', 'in_tx') THEN
        RAISE EXCEPTION 'strength %: want fenced, live or in_tx', coalesce(quote_literal(protect.strength), 'NULL')
            USING ERRCODE = '22023';
    END IF;
    IF coalesce(protect.fence_column, '') = '' THEN
        RAISE EXCEPTION 'fence_column is empty: want a column name' USING ERRCODE = '22023';
    END IF;
    SELECT k.relkind, k.relpersistence, k.relispartition, n.nspname INTO c
      FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace WHERE k.oid = protect.relation;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no relation with oid %', protect.relation::oid USING ERRCODE = '42P01';
    END IF;
    IF c.relkind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% cannot be protected: it is not a table', protect.relation USING ERRCODE = 'WG003',
            HINT = 'Protect the table behind it; a view or foreign table has no rows of its own to compare fences at.';
    END IF;
    IF c.relpersistence <> 'p' THEN
        RAISE EXCEPTION '% cannot be protected: it is unlogged or temporary', protect.relation USING ERRCODE = 'WG003',
            HINT = 'A crash empties an unlogged table, and its fences with it. ALTER TABLE … SET LOGGED first.';
    END IF;
    IF c.relispartition THEN
        RAISE EXCEPTION '% cannot be protected: it is a partition', protect.relation USING ERRCODE = 'WG003',
            HINT = 'Protect the partitioned table that it belongs to.';
    END IF;
    IF c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_inherits i WHERE i.inhparent = protect.relation) THEN
        RAISE EXCEPTION '% cannot be protected: other tables inherit from it', protect.relation USING ERRCODE = 'WG003',
            HINT = 'A key is unique in each of them, not in all: a write by key could change several rows.';
    END IF;
    IF c.relkind = 'p' AND EXISTS (SELECT 1 FROM pg_partition_tree(protect.relation) t JOIN pg_class k ON k.oid = t.relid
                                    WHERE k.relpersistence <> 'p' OR k.relkind NOT IN ('r', 'p')) THEN
        RAISE EXCEPTION '% cannot be protected: a partition of it is unlogged or a foreign table', protect.relation
            USING ERRCODE = 'WG003', HINT = 'A crash empties an unlogged table, and its fences with it.';
    END IF;
    IF c.nspname = 'fence' OR c.nspname LIKE 'pg\_%' OR c.nspname = 'information_schema' THEN
        RAISE EXCEPTION '% cannot be protected: it belongs to the system', protect.relation USING ERRCODE = 'WG003';
    END IF;

    SELECT t.atttypid, t.attnotnull, t.attgenerated, t.attidentity, pg_get_expr(d.adbin, d.adrelid) AS value INTO a
      FROM pg_attribute t LEFT JOIN pg_attrdef d ON d.adrelid = t.attrelid AND d.adnum = t.attnum
     WHERE t.attrelid = protect.relation AND t.attname = protect.fence_column AND NOT t.attisdropped;
    v_found := FOUND;
    IF v_found AND a.atttypid <> 'bigint'::regtype THEN
        RAISE EXCEPTION '% cannot be protected: column % is %, a fence needs bigint', protect.relation,
            quote_ident(protect.fence_column), format_type(a.atttypid, NULL) USING ERRCODE = 'WG003';
    END IF;
    IF v_found AND (a.attgenerated <> '' OR a.attidentity <> '') THEN
        RAISE EXCEPTION '% cannot be protected: column % is generated, a fence is written by the gate', protect.relation,
            quote_ident(protect.fence_column) USING ERRCODE = 'WG003';
    END IF;
    IF v_found AND a.value !~ '^[(]?''?0''?[)]?(::bigint)?$' THEN
        RAISE EXCEPTION '% cannot be protected: column % has the default %, want 0: a new row has seen no fence',
            protect.relation, quote_ident(protect.fence_column), a.value USING ERRCODE = 'WG003',
            HINT = format('ALTER TABLE %s ALTER %I SET DEFAULT 0', protect.relation, protect.fence_column);
    END IF;
    IF v_found AND NOT a.attnotnull THEN
        RAISE EXCEPTION '% cannot be protected: column % may be NULL, and NULL compares with no fence', protect.relation,
            quote_ident(protect.fence_column) USING ERRCODE = 'WG003',
            HINT = format('UPDATE %1$s SET %2$I = 0 WHERE %2$I IS NULL; ALTER TABLE %1$s ALTER %2$I SET DEFAULT 0,'
                          ' ALTER %2$I SET NOT NULL', protect.relation, protect.fence_column);
    END IF;
    IF NOT v_found THEN
        PERFORM set_config('lock_timeout', '2s', true);
        EXECUTE format('ALTER TABLE %s ADD COLUMN IF NOT EXISTS %I bigint NOT NULL DEFAULT 0', protect.relation, protect.fence_column);
        PERFORM set_config('lock_timeout', v_wait, true);
    ELSIF NOT EXISTS (SELECT 1 FROM fence.protected_table p
                       WHERE p.relation = protect.relation AND p.fence_column = protect.fence_column) THEN
        EXECUTE format('SELECT coalesce(max(%I), 0) FROM %s', protect.fence_column, protect.relation) INTO v_high;
    END IF;

    INSERT INTO fence.protected_table AS p (relation, fence_column, rule, strength, high_water)
    VALUES (protect.relation, protect.fence_column, protect.rule, protect.strength, v_high)
    ON CONFLICT (relation) DO UPDATE
       SET fence_column = excluded.fence_column, rule = excluded.rule, strength = excluded.strength,
           high_water = greatest(p.high_water, excluded.high_water);
    -- A column that came with fences: the ones that this database grants must be above them.
    IF v_high > (SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END FROM fence.fence_seq q) THEN
        PERFORM fence.jump(format('%s was protected, with fences up to %s in it', protect.relation, v_high));
    END IF;
END $$;
-- +goose StatementEnd

-- fence.unprotect takes a table off the register and keeps its fence column: the fences in it stay comparable should
-- the table be protected again. Drop the column yourself when that will not happen. False: it was not registered.
-- +goose StatementBegin
CREATE FUNCTION fence.unprotect(relation regclass) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    DELETE FROM fence.protected_table p WHERE p.relation = unprotect.relation;
    RETURN FOUND;
END $$;
-- +goose StatementEnd

-- fence.tables_holding_fences lists the protected tables in which some row has been written under a fence. Taking the
-- schema away would restart fences at 2 below them: every lawful writer refused, for good.
-- +goose StatementBegin
CREATE FUNCTION fence.tables_holding_fences() RETURNS TABLE (relation regclass, max_fence bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    p record;
BEGIN
    FOR p IN SELECT t.relation, t.fence_column
               FROM fence.protected_table t
               JOIN pg_attribute a ON a.attrelid = t.relation AND a.attname = t.fence_column AND NOT a.attisdropped
              ORDER BY t.relation::oid
    LOOP
        relation := p.relation;
        EXECUTE format('SELECT max(%I) FROM %s', p.fence_column, p.relation) INTO max_fence;
        IF max_fence > 0 THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 2 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    fence.lease_state(text, uuid, bigint),
    fence.dear(),
    fence.live(text, uuid, bigint),
    fence.record_rejection(text, jsonb, text, uuid, bigint, text, bigint, text, bigint, timestamptz),
    fence.protect(regclass, text, text, name),
    fence.unprotect(regclass),
    fence.tables_holding_fences()
FROM PUBLIC;

-- +goose Down
-- SET writegate.force_down = 'on' (PGOPTIONS='-c writegate.force_down=on' with the goose command line; --force with
-- fencecheck) says that the fences in those tables may be left behind.
-- +goose StatementBegin
DO $$
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
    END IF;
END $$;
-- +goose StatementEnd
DROP FUNCTION fence.tables_holding_fences();
DROP FUNCTION fence.unprotect(regclass);
DROP FUNCTION fence.protect(regclass, text, text, name);
DROP FUNCTION fence.record_rejection(text, jsonb, text, uuid, bigint, text, bigint, text, bigint, timestamptz);
DROP FUNCTION fence.live(text, uuid, bigint);
DROP VIEW fence.live_lease;
DROP FUNCTION fence.dear();
DROP FUNCTION fence.lease_state(text, uuid, bigint);
DROP TABLE fence.rejection;
DROP TABLE fence.protected_table;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 1 $$;
-- +goose StatementEnd
