-- The guard: the database itself refuses, or stamps, what goes around the gate.

-- +goose Up
ALTER TABLE fence.protected_table
    ADD COLUMN guard    text NOT NULL DEFAULT 'off',
    ADD COLUMN unfenced text NOT NULL DEFAULT 'refuse',
    ADD CONSTRAINT protected_table_guard CHECK (guard IN ('off', 'observe', 'enforce')),
    ADD CONSTRAINT protected_table_unfenced CHECK (unfenced IN ('allow', 'count', 'refuse'));
COMMENT ON COLUMN fence.protected_table.guard IS 'off, observe (refuses nothing, records what it would have refused) or enforce';
COMMENT ON COLUMN fence.protected_table.unfenced IS 'what a guard does with a write that comes under no fence: allow, count or refuse';

-- Signs what a guard leaves for itself in the transaction's settings, which anybody may write to.
CREATE TABLE fence.secret (
    id  boolean PRIMARY KEY DEFAULT true CHECK (id),
    key bytea NOT NULL
);
INSERT INTO fence.secret (key) VALUES (sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')));
COMMENT ON TABLE fence.secret IS 'proves that it was a guard that left a note for itself; nobody but the owner reads it';

-- A guard that refuses raises, and takes with it whatever it might have written down. A sequence keeps count all the same.
CREATE SEQUENCE fence.guard_refused AS bigint;
COMMENT ON SEQUENCE fence.guard_refused IS 'how many writes guards have refused, which is all that is known of them here; some may have been undone besides';
CREATE SEQUENCE fence.guard_observed AS bigint;
COMMENT ON SEQUENCE fence.guard_observed IS 'how many writes guards have let pass that they would refuse, or were told to count';

CREATE TABLE fence.observation (
    relation         regclass    NOT NULL,
    operation        text        NOT NULL,
    finding          text        NOT NULL,
    application_name text        NOT NULL,
    db_user          name        NOT NULL,
    first_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    old_fence        bigint,
    new_fence        bigint,
    entered          bigint,
    CONSTRAINT observation_finding CHECK (finding IN ('unfenced', 'lowered', 'stale', 'unproven', 'truncated'))
);
CREATE INDEX observation_kind_idx ON fence.observation (relation, operation, finding, application_name, db_user);
COMMENT ON TABLE fence.observation IS 'who does what guards would refuse, or count: the first of each kind, as an example; two at once may both be. Delete from it at will';

-- fence.enter makes the transaction one of this grant's, as fence.pin does, and lets every write to a guarded table in it be
-- checked and stamped: whatever sends it, an ORM, psql, another language. Call it first in the transaction; outside of one
-- it is over at once, and guards take the writes that follow for unfenced. It returns what the lease has left.
-- Errors: WG005 if the lease is not this grant's any more; WG002 if the isolation level is not READ COMMITTED.
-- +goose StatementBegin
CREATE FUNCTION fence.enter(name text, token uuid, fence bigint) RETURNS interval
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    p record;
BEGIN
    SELECT x.state, x.remaining, x.transaction INTO p FROM fence.pin(enter.name, enter.token, enter.fence) x;
    IF p.state <> 'held' THEN
        RAISE EXCEPTION 'lease % is not held under fence %: %', quote_literal(enter.name), enter.fence, p.state
            USING ERRCODE = 'WG005', DETAIL = p.state, HINT = 'Stop writing; acquire the lease again before going on.';
    END IF;
    PERFORM set_config('fence.entered', enter.token || ':' || enter.fence || ':' || enter.name, true);
    RETURN p.remaining;
END $$;
-- +goose StatementEnd

-- fence.signature is what only this schema can make: for one fence in one transaction.
-- +goose StatementBegin
CREATE FUNCTION fence.signature(fence bigint) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_signature text;
BEGIN
    SELECT encode(sha256(s.key || int8send(signature.fence) || xid8send(pg_current_xact_id())), 'hex') INTO v_signature
      FROM fence.secret s;
    RETURN v_signature;
END $$;
-- +goose StatementEnd

-- fence.entered returns the fence under which the transaction was entered, null if it was not, or the lease is over. The setting
-- names the grant by its token, fence and lease, and anybody may write it: what counts is what fence.live says of that grant, which is
-- asked here, in other words. A setting that has been used before in the session reads '' and not null.
-- +goose StatementBegin
CREATE FUNCTION fence.entered() RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_setting text := current_setting('fence.entered', true);
    v_grant   text;
    v_name    text;
    v_fence   bigint;
    v_live    boolean;
BEGIN
    IF v_setting IS NULL OR v_setting !~ '^[0-9a-f-]{36}:[0-9]{1,18}:' OR current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN NULL;
    END IF;
    v_grant := left(v_setting, 37 + strpos(substr(v_setting, 38), ':') - 1); -- token and fence, as far as the second colon
    v_name := substr(v_setting, length(v_grant) + 2);
    -- The clock is read above the lock, as by who reads fence.live_lease, which does not show the token.
    SELECT x.fence, x.expires_at > clock_timestamp() INTO v_fence, v_live
      FROM (SELECT l.fence, l.expires_at
              FROM fence.lease l
             WHERE l.name = v_name AND l.token || ':' || l.fence = v_grant AND (l.released_at IS NULL OR fence.dear())
               AND l.expires_at > clock_timestamp()
               FOR KEY SHARE) x;
    IF v_live IS NOT TRUE THEN
        RETURN NULL;
    END IF;
    RETURN v_fence;
END $$;
-- +goose StatementEnd

-- fence.marked returns the fence that the gate has left in the transaction for guards of tables that are written with
-- strength fenced: what the row compares is all the proof that there is of those.
-- +goose StatementBegin
CREATE FUNCTION fence.marked() RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_setting text := current_setting('fence.marked', true);
BEGIN
    IF v_setting IS NULL OR v_setting !~ '^[0-9]{1,18}$' THEN
        RETURN NULL;
    END IF;
    RETURN v_setting::bigint;
END $$;
-- +goose StatementEnd

-- fence.keys_of returns, for each key of a table, its columns' names as a JSON array, in the order of their bytes, as the
-- gate hashes them. Keys with columns of types that have no hash function are left out: the gate knows them by their text.
-- +goose StatementBegin
CREATE FUNCTION fence.keys_of(relation regclass) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    k      record;
    v_keys text[] := '{}';
BEGIN
    FOR k IN SELECT (SELECT json_agg(x.attname ORDER BY x.attname::text COLLATE "C")::text FROM pg_attribute x
                      WHERE x.attrelid = i.indrelid AND x.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])) AS names,
                    (SELECT string_agg('NULL::' || format_type(x.atttypid, -1), ', ') FROM pg_attribute x
                      WHERE x.attrelid = i.indrelid AND x.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])) AS nulls
               FROM pg_index i
              WHERE i.indrelid = keys_of.relation AND i.indisunique AND i.indimmediate AND i.indisvalid
                AND i.indpred IS NULL AND i.indexprs IS NULL
                AND NOT EXISTS (SELECT 1 FROM pg_attribute x WHERE x.attrelid = i.indrelid AND NOT x.attnotnull
                                  AND x.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))
              ORDER BY i.indisprimary DESC, i.indexrelid
    LOOP
        BEGIN
            EXECUTE format('SELECT hash_record_extended(ROW(%s), 0)', k.nulls);
            v_keys := v_keys || k.names;
        EXCEPTION WHEN undefined_function THEN
            CONTINUE;
        END;
    END LOOP;
    RETURN v_keys;
END $$;
-- +goose StatementEnd

-- fence.row_value is the SQL of a key's value, in which $1 is the row. From names alone: what runs with the owner's rights
-- must not run SQL, or casts, that whoever made the trigger or the table has chosen.
-- +goose StatementBegin
CREATE FUNCTION fence.row_value(names text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_value text;
BEGIN
    SELECT 'ROW(' || string_agg(format('($1).%I', n.name), ', ' ORDER BY n.i) || ')' INTO v_value
      FROM json_array_elements_text(row_value.names::json) WITH ORDINALITY n (name, i);
    RETURN v_value;
END $$;
-- +goose StatementEnd

-- fence.guard is the trigger. Its arguments: the mode, what to do with unfenced writes, whether a fence needs proof (the
-- table's strength is live or in_tx), the fence column, whether the table is partitioned, and its keys, as fence.keys_of has
-- them. Nothing in them changes when the table is renamed, or restored elsewhere.
--
-- A write is fenced if its transaction was entered (fence.enter, and Live writes of the gate), or, where no proof is wanted, if
-- it raises the row's fence as the gate's one statement does, or if the gate has marked the transaction. In an entered
-- transaction every write is stamped with its fence. Whoever writes, a row's fence does not fall, and whoever deletes, a
-- tombstone keeps it.
--
-- It runs with the owner's rights, for the secret and the tombstones. So it touches nothing of a row but the fence, which has
-- to be a bigint, and the hashes of its keys: a cast or a function of the table owner's would run with them.
--
-- It raises: WG006 the row has seen a newer fence; WG007 the row's fence would fall; WG008 the write comes under no fence;
-- WG009 the fence is raised without proof of holding it; WG010 TRUNCATE, which would forget all fences. It never returns
-- NULL to refuse: a cascade would leave orphans behind.
-- +goose StatementBegin
CREATE FUNCTION fence.guard() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_proof   boolean := TG_ARGV[2] = 'proof';
    v_table   regclass := CASE TG_ARGV[4] WHEN 'partitioned' THEN pg_partition_root(TG_RELID) ELSE TG_RELID END;
    v_old     bigint := 0;
    v_new     bigint := 0;
    v_entered bigint;
    v_marked  bigint;
    v_floor   bigint := 0;
    v_finding text;
    v_moving  text;
    v_hash    bigint[] := '{}';
    v_check   bigint[] := '{}';
    h         record;
BEGIN
    IF TG_OP IN ('UPDATE', 'DELETE') THEN
        IF pg_typeof(OLD.last_fence) <> 'bigint'::regtype THEN
            RAISE EXCEPTION 'column % of % is not bigint any more', TG_ARGV[3], v_table USING ERRCODE = 'WG003';
        END IF;
        v_old := OLD.last_fence;
    END IF;
    IF TG_OP IN ('UPDATE', 'INSERT') THEN
        IF pg_typeof(NEW.last_fence) <> 'bigint'::regtype THEN
            RAISE EXCEPTION 'column % of % is not bigint any more', TG_ARGV[3], v_table USING ERRCODE = 'WG003';
        END IF;
        v_new := coalesce(NEW.last_fence, 0);
    END IF;
    IF coalesce(current_setting('fence.entered', true), '') <> '' THEN
        v_entered := fence.entered();
    END IF;
    -- What nearly every write is: the gate's.
    IF TG_OP = 'UPDATE' AND v_new > v_old AND NOT v_proof AND TG_ARGV[4] = '' AND (v_entered IS NULL OR v_new >= v_entered - 1) THEN
        RETURN NEW;
    END IF;
    IF NOT v_proof THEN
        v_marked := fence.marked();
    END IF;

    -- The keys of the row that goes, or comes. An update of a partitioned table may be both, of which more below.
    IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND TG_ARGV[4] <> ''
       OR TG_OP = 'INSERT' AND EXISTS (SELECT 1 FROM fence.tombstone t WHERE t.relation = v_table) THEN
        FOR i IN 5..TG_NARGS - 1 LOOP
            BEGIN
                IF TG_OP = 'INSERT' THEN
                    EXECUTE format('SELECT hash_record_extended(%1$s, 0) AS h, hash_record_extended(%1$s, 1) AS c', fence.row_value(TG_ARGV[i])) INTO h USING NEW;
                ELSE
                    EXECUTE format('SELECT hash_record_extended(%1$s, 0) AS h, hash_record_extended(%1$s, 1) AS c', fence.row_value(TG_ARGV[i])) INTO h USING OLD;
                END IF;
            EXCEPTION WHEN undefined_column THEN
                IF TG_ARGV[0] = 'enforce' THEN
                    RAISE EXCEPTION 'a key of % has other columns than when its guard was installed: %', v_table, TG_ARGV[i]
                        USING ERRCODE = 'WG003', HINT = 'SELECT fence.protect(…) once more, which installs it anew.';
                END IF;
                CONTINUE;
            END;
            v_hash := v_hash || h.h;
            v_check := v_check || h.c;
        END LOOP;
    END IF;
    -- An update that moves a row to another partition is followed by a delete here and an insert there.
    IF TG_ARGV[4] <> '' AND TG_OP = 'UPDATE' THEN
        v_moving := v_old || ':' || coalesce(v_hash[1], 0);
    ELSIF TG_ARGV[4] <> '' AND TG_OP IN ('DELETE', 'INSERT') THEN
        v_moving := coalesce(current_setting('fence.moving', true), '');
        IF TG_OP = 'DELETE' AND v_moving = v_old || ':' || coalesce(v_hash[1], 0) || ':' || fence.signature(hashint8extended(coalesce(v_hash[1], 0), v_old)) THEN
            PERFORM set_config('fence.moving', 'insert:' || fence.signature(-1), true);
            RETURN OLD;
        ELSIF TG_OP = 'INSERT' AND v_moving = 'insert:' || fence.signature(-1) THEN
            PERFORM set_config('fence.moving', '', true);
            RETURN NEW; -- looked at as the update that it is
        END IF;
    END IF;
    IF TG_OP IN ('INSERT', 'DELETE') THEN
        FOR i IN 1..coalesce(array_length(v_hash, 1), 0) LOOP
            -- The lock is what an insert that waits for a delete has to wait for. Under another isolation level it would not
            -- see what it waited for, and what is not entered must not fail for that.
            v_floor := greatest(v_floor, CASE WHEN current_setting('transaction_isolation') = 'read committed'
                THEN fence.floor(v_table, v_hash[i], v_check[i]) ELSE fence.buried(v_table, v_hash[i], v_check[i]) END);
        END LOOP;
    END IF;

    IF TG_OP = 'TRUNCATE' THEN
        v_finding := 'truncated';
    ELSIF v_entered IS NOT NULL THEN
        IF greatest(v_old, CASE TG_OP WHEN 'INSERT' THEN v_floor ELSE 0 END) > v_entered THEN
            v_finding := 'stale';
        ELSIF v_new > v_entered AND v_proof THEN
            v_finding := 'unproven';
        ELSIF TG_OP <> 'DELETE' AND NOT (v_new = v_entered - 1 AND v_new > v_old) THEN -- which would be a seal
            NEW.last_fence := greatest(v_entered, v_new);
            v_new := NEW.last_fence;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        IF coalesce(v_marked < v_old, true) THEN
            v_finding := 'unfenced';
        END IF;
    ELSIF v_new < greatest(v_old, CASE TG_OP WHEN 'INSERT' THEN v_floor ELSE 0 END) AND NOT (TG_OP = 'INSERT' AND v_new = 0) THEN
        v_finding := 'lowered';
    ELSIF v_new > v_old THEN
        IF v_proof THEN
            v_finding := 'unproven';
        END IF;
    ELSIF v_new = 0 OR coalesce(v_marked <> v_new, true) THEN
        v_finding := 'unfenced';
    END IF;

    IF v_finding = 'unfenced' AND TG_ARGV[1] = 'allow' THEN
        v_finding := NULL;
    ELSIF v_finding = 'unproven' AND TG_ARGV[0] = 'observe' AND EXISTS (
              SELECT 1 FROM fence.term t JOIN fence.lease l ON l.name = t.name AND l.fence = t.fence
               WHERE t.fence = v_new AND l.released_at IS NULL) THEN
        -- A gate that knows of no guard yet shows no proof, until one refuses it. Here nothing is refused, and the newest grant's
        -- write is no finding.
        v_finding := NULL;
    ELSIF v_finding IS NOT NULL AND TG_ARGV[0] = 'enforce' AND NOT (v_finding = 'unfenced' AND TG_ARGV[1] = 'count') THEN
        PERFORM nextval('fence.guard_refused');
        RAISE EXCEPTION '% of % refused: %', TG_OP, v_table, CASE v_finding
            WHEN 'stale' THEN format('the row has seen a newer fence (seen %s, entered with %s)', greatest(v_old, v_floor), v_entered)
            WHEN 'lowered' THEN format('the row''s fence would fall from %s to %s', greatest(v_old, v_floor), v_new)
            WHEN 'unfenced' THEN 'it comes under no fence'
            WHEN 'unproven' THEN format('fence %s is claimed without proof of holding it', v_new)
            ELSE 'every row would forget its fence' END
            USING ERRCODE = CASE v_finding WHEN 'stale' THEN 'WG006' WHEN 'lowered' THEN 'WG007' WHEN 'unfenced' THEN 'WG008'
                                           WHEN 'unproven' THEN 'WG009' ELSE 'WG010' END,
                  HINT = CASE
                      WHEN v_finding = 'stale' THEN 'Stop writing: somebody else is at work.'
                      WHEN v_entered IS NULL AND coalesce(current_setting('fence.entered', true), '') <> '' THEN 'The lease under which this transaction was entered is over: stop writing.'
                      WHEN v_finding = 'lowered' THEN 'Leave the fence column out of the statement: the guard stamps it.'
                      WHEN v_finding = 'truncated' THEN 'DELETE the rows, or fence.unprotect() the table first.'
                      ELSE 'Write through the gate, or after SELECT fence.enter(name, token, fence) in the same transaction.' END,
                  TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
    ELSIF v_finding IS NOT NULL THEN
        PERFORM nextval('fence.guard_observed');
        -- Under SERIALIZABLE looking would be a conflict by itself. Whatever goes wrong here is not the write's business.
        IF current_setting('transaction_isolation') <> 'serializable' AND NOT EXISTS (
            SELECT 1 FROM fence.observation o
             WHERE o.relation = v_table AND o.operation = TG_OP AND o.finding = v_finding
               AND o.application_name = current_setting('application_name') AND o.db_user = session_user) THEN
            BEGIN
                INSERT INTO fence.observation (relation, operation, finding, application_name, db_user, old_fence, new_fence, entered)
                VALUES (v_table, TG_OP, v_finding, current_setting('application_name'), session_user, v_old, v_new, v_entered);
            EXCEPTION WHEN OTHERS THEN
                NULL;
            END;
        END IF;
    END IF;

    IF TG_OP = 'DELETE' THEN
        -- Whoever deletes it: the fence must not go with the row. The gate buries what it deletes besides.
        IF greatest(v_old, v_entered) > 0 THEN
            FOR i IN 1..coalesce(array_length(v_hash, 1), 0) LOOP
                INSERT INTO fence.tombstone AS t (relation, key_hash, key_check, row_key, fence, lease_name)
                VALUES (v_table, v_hash[i], v_check[i], '{}', greatest(v_old, v_entered), '')
                ON CONFLICT (relation, key_hash, key_check) DO UPDATE
                   SET fence = greatest(t.fence, excluded.fence), deleted_at = excluded.deleted_at;
            END LOOP;
        END IF;
        RETURN OLD;
    ELSIF TG_OP = 'TRUNCATE' THEN
        RETURN NULL; -- which a statement's trigger may return; it refuses nothing
    END IF;
    IF NEW.last_fence IS NOT NULL OR TG_OP = 'INSERT' AND v_floor > 0 THEN
        NEW.last_fence := greatest(v_new, v_old, CASE TG_OP WHEN 'INSERT' THEN v_floor ELSE 0 END);
    END IF;
    IF TG_OP = 'UPDATE' AND v_moving IS NOT NULL THEN
        PERFORM set_config('fence.moving', v_moving || ':' || fence.signature(hashint8extended(coalesce(v_hash[1], 0), v_old)), true);
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd

-- fence.guard_rekey is the trigger for updates that change a key: the row goes under its old key, which leaves a tombstone, and
-- comes under its new one, whose floor it must be above. It runs after fence.guard, with the same arguments and the same care,
-- and raises WG006.
-- +goose StatementBegin
CREATE FUNCTION fence.guard_rekey() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_table regclass := CASE TG_ARGV[4] WHEN 'partitioned' THEN pg_partition_root(TG_RELID) ELSE TG_RELID END;
    v_fence bigint;
    v_floor bigint := 0;
    v_row   text;
    h       record;
BEGIN
    IF pg_typeof(OLD.last_fence) <> 'bigint'::regtype OR pg_typeof(NEW.last_fence) <> 'bigint'::regtype OR NEW.last_fence IS NULL THEN
        RETURN NEW; -- which fence.guard, or the column, has refused
    END IF;
    v_fence := greatest(OLD.last_fence, NEW.last_fence);
    FOR i IN 5..TG_NARGS - 1 LOOP
        BEGIN
            v_row := fence.row_value(TG_ARGV[i]);
            EXECUTE format('SELECT hash_record_extended(%1$s, 0) AS h0, hash_record_extended(%1$s, 1) AS c0, hash_record_extended(%2$s, 0) AS h1, hash_record_extended(%2$s, 1) AS c1',
                           v_row, replace(v_row, '($1)', '($2)')) INTO h USING OLD, NEW;
        EXCEPTION WHEN undefined_column THEN
            CONTINUE; -- fence.guard has told
        END;
        CONTINUE WHEN h.h0 = h.h1 AND h.c0 = h.c1;
        IF current_setting('transaction_isolation') = 'read committed' THEN
            -- Both, in an order that everybody keeps.
            PERFORM fence.floor(v_table, x.h, x.c) FROM (VALUES (h.h0, h.c0), (h.h1, h.c1)) x (h, c) ORDER BY x.h, x.c;
        END IF;
        v_floor := greatest(v_floor, fence.buried(v_table, h.h1, h.c1));
        IF v_floor > v_fence AND TG_ARGV[0] = 'enforce' THEN
            PERFORM nextval('fence.guard_refused');
            RAISE EXCEPTION 'UPDATE of % refused: the row that had the new key has seen a newer fence (seen %, sent %)', v_table, v_floor, v_fence
                USING ERRCODE = 'WG006', HINT = 'Stop writing: somebody else is at work.', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
        END IF;
        IF v_fence > 0 THEN
            INSERT INTO fence.tombstone AS t (relation, key_hash, key_check, row_key, fence, lease_name)
            VALUES (v_table, h.h0, h.c0, '{}', v_fence, '')
            ON CONFLICT (relation, key_hash, key_check) DO UPDATE
               SET fence = greatest(t.fence, excluded.fence), deleted_at = excluded.deleted_at;
        END IF;
    END LOOP;
    NEW.last_fence := greatest(v_fence, v_floor);
    RETURN NEW;
END $$;
-- +goose StatementEnd

-- fence.install_guard puts a table's guard in place as the register has it, or takes it away. PostgreSQL copies triggers for
-- rows to new partitions, and not those for TRUNCATE: call fence.protect again once there is a new one.
-- +goose StatementBegin
CREATE FUNCTION fence.install_guard(relation regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    p           record;
    v_suffix    text := '';
    v_name      text;
    v_function  text;
    v_arguments text;
    v_keys      text[] := fence.keys_of(install_guard.relation);
    v_columns   text[];
    v_part      regclass;
    v_parts     regclass[];
BEGIN
    SELECT coalesce(array_agg(t.relid ORDER BY t.level, t.relid::oid), ARRAY[install_guard.relation]) INTO v_parts
      FROM pg_partition_tree(install_guard.relation) t;
    FOREACH v_part IN ARRAY v_parts LOOP
        IF EXISTS (SELECT 1 FROM pg_trigger t WHERE t.tgrelid = v_part AND t.tgname = '~writegate_guard_truncate') THEN
            EXECUTE format('DROP TRIGGER "~writegate_guard_truncate" ON %s', v_part);
        END IF;
    END LOOP;
    FOREACH v_name IN ARRAY ARRAY['~writegate_guard', '~writegate_guard_rows', '~writegate_guard_keys'] LOOP
        IF EXISTS (SELECT 1 FROM pg_trigger t WHERE t.tgrelid = install_guard.relation AND t.tgname = v_name) THEN
            EXECUTE format('DROP TRIGGER %I ON %s', v_name, install_guard.relation);
        END IF;
    END LOOP;
    SELECT t.fence_column, t.guard, t.unfenced, t.strength, c.relkind INTO p
      FROM fence.protected_table t JOIN pg_class c ON c.oid = t.relation WHERE t.relation = install_guard.relation;
    IF NOT FOUND OR p.guard = 'off' THEN
        RETURN;
    END IF;
    IF p.fence_column <> 'last_fence' THEN
        v_suffix := '_' || md5(p.fence_column);
    END IF;
    FOREACH v_name IN ARRAY ARRAY['guard', 'guard_rekey'] LOOP
        v_function := format('fence.%I', v_name || v_suffix);
        IF to_regprocedure(v_function || '()') IS NULL THEN
            -- The same function, for a column of another name.
            EXECUTE replace(replace(pg_get_functiondef(to_regprocedure('fence.' || v_name || '()')), format('FUNCTION fence.%s()', v_name), format('FUNCTION %s()', v_function)),
                            '.last_fence', '.' || quote_ident(p.fence_column));
            EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', v_function);
        END IF;
    END LOOP;
    v_function := format('fence.%I', 'guard' || v_suffix);
    SELECT string_agg(quote_literal(x.argument), ', ' ORDER BY x.n) INTO v_arguments
      FROM unnest(ARRAY[p.guard, p.unfenced, CASE WHEN p.strength = 'fenced' THEN '' ELSE 'proof' END,
                        p.fence_column, CASE p.relkind WHEN 'p' THEN 'partitioned' ELSE '' END]
                  || v_keys) WITH ORDINALITY x (argument, n);
    IF p.strength = 'fenced' AND p.relkind = 'r' THEN
        -- An update that raises the fence is what the gate does, and needs no proof here: it need not even get to the function.
        EXECUTE format($trigger$CREATE TRIGGER "~writegate_guard" BEFORE UPDATE ON %1$s FOR EACH ROW
            WHEN ((NEW.%4$I OPERATOR(pg_catalog.>) OLD.%4$I) IS NOT TRUE OR pg_catalog.current_setting('fence.entered', true) OPERATOR(pg_catalog.<>) '')
            EXECUTE FUNCTION %2$s(%3$s)$trigger$, install_guard.relation, v_function, v_arguments, p.fence_column);
        EXECUTE format('CREATE TRIGGER "~writegate_guard_rows" BEFORE INSERT OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
                       install_guard.relation, v_function, v_arguments);
    ELSE
        EXECUTE format('CREATE TRIGGER "~writegate_guard" BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
                       install_guard.relation, v_function, v_arguments);
    END IF;
    SELECT array_agg(DISTINCT quote_ident(c.name)) INTO v_columns
      FROM unnest(v_keys) k (names) CROSS JOIN LATERAL json_array_elements_text(k.names::json) c (name);
    IF v_columns IS NULL THEN
        RAISE NOTICE '% has no key that could be guarded: a row that is deleted leaves no tombstone', install_guard.relation;
    ELSE
        EXECUTE format('CREATE TRIGGER "~writegate_guard_keys" BEFORE UPDATE OF %s ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
                       array_to_string(v_columns, ', '), install_guard.relation, format('fence.%I', 'guard_rekey' || v_suffix), v_arguments);
    END IF;
    FOREACH v_part IN ARRAY v_parts LOOP
        EXECUTE format('CREATE TRIGGER "~writegate_guard_truncate" BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%s)',
                       v_part, v_function, v_arguments);
    END LOOP;
END $$;
-- +goose StatementEnd

-- What fence.protect and fence.unprotect did goes on under other names, by which they also name their arguments.
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE replace(replace(pg_get_functiondef('fence.protect(regclass, text, text, name)'::regprocedure),
                            'fence.protect(', 'fence.protect_column('), 'protect.', 'protect_column.');
    EXECUTE replace(replace(pg_get_functiondef('fence.unprotect(regclass)'::regprocedure),
                            'fence.unprotect(', 'fence.unprotect_column('), 'unprotect.', 'unprotect_column.');
END $$;
-- +goose StatementEnd
DROP FUNCTION fence.protect(regclass, text, text, name);
DROP FUNCTION fence.unprotect(regclass);

-- fence.lock_within locks a table and its partitions, all of them within two seconds, or within the caller's lock_timeout
-- where that is shorter: what waits for the first partition would otherwise wait for all the others' timeouts, one by one.
-- Raises 55P03.
-- +goose StatementBegin
CREATE FUNCTION fence.lock_within(relation regclass, mode text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_wait  text := current_setting('lock_timeout');
    v_until timestamptz := clock_timestamp() + CASE WHEN v_wait::interval = interval '0' THEN interval '2 seconds'
                                                    ELSE least(v_wait::interval, interval '2 seconds') END;
    t       record;
BEGIN
    FOR t IN SELECT lock_within.relation AS relid, 0 AS level
             UNION SELECT x.relid, x.level FROM pg_partition_tree(lock_within.relation) x WHERE x.level > 0 ORDER BY 2, 1 LOOP
        PERFORM set_config('lock_timeout', greatest(1, ceil(extract(epoch FROM v_until - clock_timestamp()) * 1000))::bigint::text, true);
        EXECUTE format('LOCK TABLE ONLY %s IN %s MODE', t.relid, lock_within.mode);
    END LOOP;
    PERFORM set_config('lock_timeout', v_wait, true);
END $$;
-- +goose StatementEnd

-- fence.protect makes a table ready for protected writes: it adds the fence column where that is missing (no rewrite: a
-- constant default), registers the table, and installs or removes its guard. Call it in your own migration. What it is not
-- told stays as it is registered; of a table that is not, it is rule once, strength fenced, column last_fence, no guard. It
-- needs the table to itself for a moment and gives up with 55P03 after two seconds rather than let readers queue. What cannot
-- be safe is refused with WG003.
-- +goose StatementBegin
CREATE FUNCTION fence.protect(
    relation regclass, rule text DEFAULT NULL, strength text DEFAULT NULL, fence_column name DEFAULT NULL,
    guard text DEFAULT NULL, unfenced text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_held bigint;
    p      record;
BEGIN
    IF protect.guard NOT IN ('off', 'observe', 'enforce') THEN
        RAISE EXCEPTION 'guard %: want off, observe or enforce', quote_literal(protect.guard) USING ERRCODE = '22023';
    END IF;
    IF protect.unfenced NOT IN ('allow', 'count', 'refuse') THEN
        RAISE EXCEPTION 'unfenced %: want allow, count or refuse', quote_literal(protect.unfenced) USING ERRCODE = '22023';
    END IF;
    SELECT x.rule, x.strength, x.fence_column, x.guard INTO p FROM fence.protected_table x WHERE x.relation = protect.relation;
    IF protect.fence_column <> p.fence_column THEN
        -- Another column knows nothing of the fences in the one before.
        EXECUTE format('SELECT max(%I) FROM %s', p.fence_column, protect.relation) INTO v_held;
        IF v_held > 0 THEN
            RAISE EXCEPTION '% cannot be protected by column %: column % holds fences up to %', protect.relation,
                quote_ident(protect.fence_column), quote_ident(p.fence_column), v_held USING ERRCODE = 'WG003',
                HINT = format('ALTER TABLE %s RENAME %I TO %I keeps them; or fence.unprotect() the table first.', protect.relation, p.fence_column, protect.fence_column);
        END IF;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = protect.relation AND NOT a.attisdropped
                      AND a.attname = coalesce(protect.fence_column, p.fence_column, 'last_fence'))
       AND EXISTS (SELECT 1 FROM pg_class c WHERE c.oid = protect.relation AND c.relkind IN ('r', 'p')) THEN
        PERFORM fence.lock_within(protect.relation, 'ACCESS EXCLUSIVE'); -- which no reader waits for any longer
    END IF;
    PERFORM fence.protect_column(protect.relation, coalesce(protect.rule, p.rule, 'once'), coalesce(protect.strength, p.strength, 'fenced'),
                                 coalesce(protect.fence_column, p.fence_column, 'last_fence'));
    UPDATE fence.protected_table x
       SET guard = coalesce(protect.guard, x.guard), unfenced = coalesce(protect.unfenced, x.unfenced)
     WHERE x.relation = protect.relation;
    IF coalesce(protect.guard, 'off') <> 'off' OR coalesce(p.guard, 'off') <> 'off' THEN
        -- Readers do not wait for this one, writers do; dropping a guard takes more.
        PERFORM fence.lock_within(protect.relation, CASE WHEN coalesce(p.guard, 'off') = 'off' THEN 'SHARE ROW EXCLUSIVE' ELSE 'ACCESS EXCLUSIVE' END);
        PERFORM fence.install_guard(protect.relation);
    END IF;
END $$;
-- +goose StatementEnd

-- fence.unprotect takes a table off the register, and its guard off the table, and keeps its fence column: the fences in
-- it stay comparable should the table be protected again. Drop the column yourself when that will not happen. False: it was not registered.
-- +goose StatementBegin
CREATE FUNCTION fence.unprotect(relation regclass) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_had text;
BEGIN
    SELECT p.guard INTO v_had FROM fence.protected_table p WHERE p.relation = unprotect.relation;
    IF NOT fence.unprotect_column(unprotect.relation) THEN
        RETURN false;
    END IF;
    IF v_had <> 'off' AND EXISTS (SELECT 1 FROM pg_class c WHERE c.oid = unprotect.relation) THEN -- it may be gone
        PERFORM fence.lock_within(unprotect.relation, 'ACCESS EXCLUSIVE');
        PERFORM fence.install_guard(unprotect.relation);
    END IF;
    RETURN true;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 4 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    fence.enter(text, uuid, bigint),
    fence.signature(bigint),
    fence.entered(),
    fence.marked(),
    fence.keys_of(regclass),
    fence.row_value(text),
    fence.guard(),
    fence.guard_rekey(),
    fence.install_guard(regclass),
    fence.lock_within(regclass, text),
    fence.protect_column(regclass, text, text, name),
    fence.unprotect_column(regclass),
    fence.protect(regclass, text, text, name, text, text),
    fence.unprotect(regclass)
FROM PUBLIC;

-- +goose Down
SELECT fence.refuse_down();
-- Guards go with what they are made of.
-- +goose StatementBegin
DO $$
DECLARE
    p record;
BEGIN
    UPDATE fence.protected_table SET guard = 'off';
    FOR p IN SELECT t.relation FROM fence.protected_table t ORDER BY t.relation::oid LOOP
        PERFORM fence.install_guard(p.relation);
    END LOOP;
    FOR p IN SELECT f.oid::regprocedure AS function FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
              WHERE n.nspname = 'fence' AND f.proname ~ '^guard(_rekey)?_[0-9a-f]{32}$' LOOP
        EXECUTE format('DROP FUNCTION %s', p.function);
    END LOOP;
END $$;
-- +goose StatementEnd
DROP FUNCTION fence.protect(regclass, text, text, name, text, text);
DROP FUNCTION fence.unprotect(regclass);
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE replace(pg_get_functiondef('fence.protect_column(regclass, text, text, name)'::regprocedure), 'protect_column', 'protect');
    EXECUTE replace(pg_get_functiondef('fence.unprotect_column(regclass)'::regprocedure), 'unprotect_column', 'unprotect');
    REVOKE ALL ON FUNCTION fence.protect(regclass, text, text, name), fence.unprotect(regclass) FROM PUBLIC;
END $$;
-- +goose StatementEnd
DROP FUNCTION fence.protect_column(regclass, text, text, name);
DROP FUNCTION fence.unprotect_column(regclass);
DROP FUNCTION fence.lock_within(regclass, text);
DROP FUNCTION fence.install_guard(regclass);
DROP FUNCTION fence.guard_rekey();
DROP FUNCTION fence.guard();
DROP FUNCTION fence.row_value(text);
DROP FUNCTION fence.keys_of(regclass);
DROP FUNCTION fence.marked();
DROP FUNCTION fence.entered();
DROP FUNCTION fence.enter(text, uuid, bigint);
DROP FUNCTION fence.signature(bigint);
DROP TABLE fence.observation;
DROP SEQUENCE fence.guard_observed;
DROP SEQUENCE fence.guard_refused;
DROP TABLE fence.secret;
ALTER TABLE fence.protected_table DROP COLUMN guard, DROP COLUMN unfenced;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 3 $$;
-- +goose StatementEnd
