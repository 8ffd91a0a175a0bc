-- The guard: the database itself refuses, or stamps, what goes around the gate.

-- +goose Up
ALTER TABLE fence.protected_table
    ADD COLUMN guard    text NOT NULL DEFAULT 'off',
    ADD COLUMN unfenced text NOT NULL DEFAULT 'refuse',
    ADD CONSTRAINT protected_table_guard CHECK (guard IN ('off', 'observe', 'enforce')),
    ADD CONSTRAINT protected_table_unfenced CHECK (unfenced IN ('allow', 'count', 'refuse'));
COMMENT ON COLUMN fence.protected_table.guard IS 'off, observe (refuses nothing, records what it would have refused) or enforce';
COMMENT ON COLUMN fence.protected_table.unfenced IS 'what a guard does with a write that comes under no fence: allow, count or refuse';

-- Signs what fence.enter leaves in the transaction's settings, which anybody may write to.
CREATE TABLE fence.secret (
    id  boolean PRIMARY KEY DEFAULT true CHECK (id),
    key bytea NOT NULL
);
INSERT INTO fence.secret (key) VALUES (sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')));
COMMENT ON TABLE fence.secret IS 'proves that it was fence.enter that entered a transaction; nobody but the owner reads it';

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
    row_key          jsonb,
    old_fence        bigint,
    new_fence        bigint,
    entered          bigint,
    PRIMARY KEY (relation, operation, finding, application_name, db_user),
    CONSTRAINT observation_finding CHECK (finding IN ('unfenced', 'lowered', 'stale', 'unproven', 'truncated'))
);
COMMENT ON TABLE fence.observation IS 'who does what guards would refuse, or count: the first of each kind, as an example';

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
    PERFORM fence.stamp_with(enter.fence);
    RETURN p.remaining;
END $$;
-- +goose StatementEnd

-- fence.live_entered is fence.live for a write to a guarded table, which has to see that it was asked.
-- +goose StatementBegin
CREATE FUNCTION fence.live_entered(name text, token uuid, fence bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF NOT fence.live(live_entered.name, live_entered.token, live_entered.fence) THEN
        RETURN false;
    END IF;
    PERFORM fence.stamp_with(live_entered.fence);
    RETURN true;
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

-- +goose StatementBegin
CREATE FUNCTION fence.stamp_with(fence bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM set_config('fence.entered', stamp_with.fence || ':' || fence.signature(stamp_with.fence), true);
END $$;
-- +goose StatementEnd

-- fence.entered returns the fence under which the transaction was entered, null if it was not. A setting that has been used
-- before in the session reads '' and not null; one that is not signed for this transaction is somebody's invention.
-- +goose StatementBegin
CREATE FUNCTION fence.entered() RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_setting text := current_setting('fence.entered', true);
    v_fence   bigint;
BEGIN
    IF v_setting IS NULL OR v_setting = '' THEN
        RETURN NULL;
    END IF;
    IF v_setting !~ '^[0-9]{1,19}:[0-9a-f]{64}$' THEN
        RETURN NULL;
    END IF;
    v_fence := split_part(v_setting, ':', 1)::bigint;
    IF split_part(v_setting, ':', 2) <> fence.signature(v_fence) THEN
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
    IF v_setting IS NULL OR v_setting !~ '^[0-9]{1,19}$' THEN
        RETURN NULL;
    END IF;
    RETURN v_setting::bigint;
END $$;
-- +goose StatementEnd

-- fence.keys_of returns, for each key of a table, the SQL of its row value, in which $1 is a row of it, as the gate hashes
-- it; columns in the order of their names' bytes, and the text of those whose types have no hash function.
-- +goose StatementBegin
CREATE FUNCTION fence.keys_of(relation regclass) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    k      record;
    a      record;
    v_row  text;
    v_keys text[] := '{}';
BEGIN
    FOR k IN SELECT i.indrelid, i.indkey[0:i.indnkeyatts - 1] AS columns FROM pg_index i
              WHERE i.indrelid = keys_of.relation AND i.indisunique AND i.indimmediate AND i.indisvalid
                AND i.indpred IS NULL AND i.indexprs IS NULL
                AND NOT EXISTS (SELECT 1 FROM pg_attribute x WHERE x.attrelid = i.indrelid AND NOT x.attnotnull
                                  AND x.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))
              ORDER BY i.indisprimary DESC, i.indexrelid
    LOOP
        v_row := '';
        FOR a IN SELECT x.attname, x.atttypid FROM pg_attribute x WHERE x.attrelid = k.indrelid AND x.attnum = ANY (k.columns)
                  ORDER BY x.attname::text COLLATE "C"
        LOOP
            BEGIN
                EXECUTE format('SELECT hash_record_extended(ROW(NULL::%s), 0)', format_type(a.atttypid, -1));
                v_row := v_row || format(', ($1).%I', a.attname);
            EXCEPTION WHEN undefined_function THEN
                v_row := v_row || format(', (($1).%I)::text', a.attname);
            END;
        END LOOP;
        v_keys := v_keys || ('ROW(' || substr(v_row, 3) || ')');
    END LOOP;
    RETURN v_keys;
END $$;
-- +goose StatementEnd

-- fence.guard is the trigger. Its arguments: the mode, what to do with unfenced writes, whether a fence needs proof (the
-- table's strength is live or in_tx), the fence column, whether the table is partitioned, and its keys, as fence.keys_of has
-- them. Nothing in them changes when the table is renamed, or restored elsewhere.
--
-- A write is fenced if its transaction was entered (fence.enter, and Live writes of the gate), or if it raises the row's
-- fence as the gate's one statement does, or if the gate has marked the transaction. In an entered transaction every
-- write is stamped with its fence. Whoever writes, a row's fence does not fall.
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
    v_floor   bigint := 0;
    v_finding text;
    v_one     bigint;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        v_old := OLD.last_fence;
        v_new := NEW.last_fence;
        -- What nearly every write is: the gate's.
        IF v_new > v_old AND NOT v_proof THEN
            IF coalesce(current_setting('fence.entered', true), '') <> '' THEN
                v_entered := fence.entered();
            END IF;
            IF v_entered IS NULL OR v_new >= v_entered - 1 THEN
                IF TG_ARGV[4] = 'partitioned' THEN -- it may become a delete here and an insert there
                    PERFORM set_config('fence.marked', v_new::text, true);
                END IF;
                RETURN NEW;
            END IF;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        v_old := OLD.last_fence;
    ELSIF TG_OP = 'INSERT' THEN
        v_new := NEW.last_fence;
    ELSE
        v_finding := 'truncated';
    END IF;
    v_entered := coalesce(v_entered, fence.entered());

    IF v_finding IS NULL AND TG_OP <> 'DELETE' AND v_new IS NULL THEN
        v_new := 0; -- an explicit NULL, which the column refuses by itself
    ELSIF TG_OP = 'INSERT' AND EXISTS (SELECT 1 FROM fence.tombstone t WHERE t.relation = v_table) THEN
        FOR i IN 5..TG_NARGS - 1 LOOP
            EXECUTE format('SELECT fence.%s($2, hash_record_extended(%2$s, 0), hash_record_extended(%2$s, 1))',
                           CASE WHEN v_entered IS NULL THEN 'buried' ELSE 'floor' END, TG_ARGV[i])
               INTO v_one USING NEW, v_table;
            v_floor := greatest(v_floor, v_one);
        END LOOP;
    END IF;

    IF v_finding IS NOT NULL THEN
        NULL;
    ELSIF v_entered IS NOT NULL THEN
        IF greatest(v_old, v_floor) > v_entered THEN
            v_finding := 'stale';
        ELSIF v_new > v_entered AND v_proof THEN
            v_finding := 'unproven';
        ELSIF TG_OP <> 'DELETE' AND NOT (v_new = v_entered - 1 AND v_new > v_old) THEN -- which would be a seal
            NEW.last_fence := greatest(v_entered, v_new);
            v_new := NEW.last_fence;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        IF coalesce(fence.marked() < v_old, true) THEN
            v_finding := 'unfenced';
        END IF;
    ELSIF v_new < greatest(v_old, v_floor) AND NOT (TG_OP = 'INSERT' AND v_new = 0) THEN
        v_finding := 'lowered';
    ELSIF v_new > v_old THEN
        IF v_proof THEN
            v_finding := 'unproven';
        END IF;
    ELSIF v_new = 0 OR coalesce(fence.marked() <> v_new, true) THEN
        v_finding := 'unfenced';
    END IF;

    IF v_finding = 'unfenced' AND TG_ARGV[1] = 'allow' THEN
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
                  HINT = CASE v_finding
                      WHEN 'stale' THEN 'Stop writing: somebody else is at work.'
                      WHEN 'lowered' THEN 'Leave the fence column out of the statement: the guard stamps it.'
                      WHEN 'truncated' THEN 'DELETE the rows, or fence.unprotect() the table first.'
                      ELSE 'Write through the gate, or after SELECT fence.enter(name, token, fence) in the same transaction.' END,
                  TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
    ELSIF v_finding IS NOT NULL THEN
        PERFORM nextval('fence.guard_observed');
        IF NOT EXISTS (SELECT 1 FROM fence.observation o
                        WHERE o.relation = v_table AND o.operation = TG_OP AND o.finding = v_finding
                          AND o.application_name = current_setting('application_name') AND o.db_user = session_user) THEN
            INSERT INTO fence.observation (relation, operation, finding, application_name, db_user, row_key, old_fence, new_fence, entered)
            VALUES (v_table, TG_OP, v_finding, current_setting('application_name'), session_user,
                    CASE TG_OP WHEN 'DELETE' THEN to_jsonb(OLD) WHEN 'TRUNCATE' THEN NULL ELSE to_jsonb(NEW) END,
                    v_old, v_new, v_entered)
            ON CONFLICT DO NOTHING;
        END IF;
    END IF;

    IF TG_OP = 'DELETE' THEN
        -- The gate buries what it deletes by itself; of anything else the fence must not go with the row.
        IF greatest(v_old, v_entered) > 0 AND coalesce(fence.marked() < v_old, true) THEN
            FOR i IN 5..TG_NARGS - 1 LOOP
                EXECUTE format('INSERT INTO fence.tombstone AS t (relation, key_hash, key_check, row_key, fence, lease_name)
                                VALUES ($2, hash_record_extended(%1$s, 0), hash_record_extended(%1$s, 1), to_jsonb(%1$s), $3, '''')
                                ON CONFLICT (relation, key_hash, key_check) DO UPDATE
                                   SET fence = greatest(t.fence, excluded.fence), deleted_at = excluded.deleted_at', TG_ARGV[i])
                  USING OLD, v_table, greatest(v_old, v_entered);
            END LOOP;
        END IF;
        RETURN OLD;
    ELSIF TG_OP = 'TRUNCATE' THEN
        RETURN NULL; -- which a statement's trigger may return; it refuses nothing
    END IF;
    NEW.last_fence := greatest(NEW.last_fence, v_old, v_floor);
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
    v_function  text := 'fence.guard';
    v_arguments text;
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
    IF EXISTS (SELECT 1 FROM pg_trigger t WHERE t.tgrelid = install_guard.relation AND t.tgname = '~writegate_guard') THEN
        EXECUTE format('DROP TRIGGER "~writegate_guard" ON %s', install_guard.relation);
    END IF;
    SELECT t.fence_column, t.guard, t.unfenced, t.strength, c.relkind INTO p
      FROM fence.protected_table t JOIN pg_class c ON c.oid = t.relation WHERE t.relation = install_guard.relation;
    IF NOT FOUND OR p.guard = 'off' THEN
        RETURN;
    END IF;
    IF p.fence_column <> 'last_fence' THEN
        -- The same function, for a column of another name.
        v_function := format('fence.%I', 'guard_' || md5(p.fence_column));
    END IF;
    IF to_regprocedure(v_function || '()') IS NULL THEN
        EXECUTE replace(replace(pg_get_functiondef('fence.guard()'::regprocedure), 'FUNCTION fence.guard()', format('FUNCTION %s()', v_function)),
                        '.last_fence', '.' || quote_ident(p.fence_column));
        EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', v_function);
    END IF;
    SELECT string_agg(quote_literal(x.argument), ', ' ORDER BY x.n) INTO v_arguments
      FROM unnest(ARRAY[p.guard, p.unfenced, CASE WHEN p.strength = 'fenced' THEN '' ELSE 'proof' END,
                        p.fence_column, CASE p.relkind WHEN 'p' THEN 'partitioned' ELSE '' END]
                  || fence.keys_of(install_guard.relation)) WITH ORDINALITY x (argument, n);
    EXECUTE format('CREATE TRIGGER "~writegate_guard" BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
                   install_guard.relation, v_function, v_arguments);
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

-- fence.protect makes a table ready for protected writes: it adds the fence column where that is missing (no rewrite: a
-- constant default), registers the table, and installs or removes its guard. Call it in your own migration; called again it
-- changes what it is told, and leaves the guard as it is where it is told nothing of it. It needs the table to itself for a
-- moment and gives up with 55P03 after two seconds rather than let readers queue. What cannot be safe is refused with WG003.
-- +goose StatementBegin
CREATE FUNCTION fence.protect(
    relation regclass, rule text DEFAULT 'once', strength text DEFAULT 'fenced', fence_column name DEFAULT 'last_fence',
    guard text DEFAULT NULL, unfenced text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_wait text := current_setting('lock_timeout');
    v_had  text;
BEGIN
    IF protect.guard NOT IN ('off', 'observe', 'enforce') THEN
        RAISE EXCEPTION 'guard %: want off, observe or enforce', quote_literal(protect.guard) USING ERRCODE = '22023';
    END IF;
    IF protect.unfenced NOT IN ('allow', 'count', 'refuse') THEN
        RAISE EXCEPTION 'unfenced %: want allow, count or refuse', quote_literal(protect.unfenced) USING ERRCODE = '22023';
    END IF;
    SELECT p.guard INTO v_had FROM fence.protected_table p WHERE p.relation = protect.relation;
    PERFORM fence.protect_column(protect.relation, protect.rule, protect.strength, protect.fence_column);
    UPDATE fence.protected_table p
       SET guard = coalesce(protect.guard, p.guard), unfenced = coalesce(protect.unfenced, p.unfenced)
     WHERE p.relation = protect.relation;
    IF coalesce(protect.guard, 'off') <> 'off' OR coalesce(v_had, 'off') <> 'off' THEN
        PERFORM set_config('lock_timeout', '2s', true);
        PERFORM fence.install_guard(protect.relation);
        PERFORM set_config('lock_timeout', v_wait, true);
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
    v_wait text := current_setting('lock_timeout');
    v_had  text;
BEGIN
    SELECT p.guard INTO v_had FROM fence.protected_table p WHERE p.relation = unprotect.relation;
    IF NOT fence.unprotect_column(unprotect.relation) THEN
        RETURN false;
    END IF;
    IF v_had <> 'off' THEN
        PERFORM set_config('lock_timeout', '2s', true);
        PERFORM fence.install_guard(unprotect.relation);
        PERFORM set_config('lock_timeout', v_wait, true);
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
    fence.live_entered(text, uuid, bigint),
    fence.signature(bigint),
    fence.stamp_with(bigint),
    fence.entered(),
    fence.marked(),
    fence.keys_of(regclass),
    fence.guard(),
    fence.install_guard(regclass),
    fence.protect_column(regclass, text, text, name),
    fence.unprotect_column(regclass),
    fence.protect(regclass, text, text, name, text, text),
    fence.unprotect(regclass)
FROM PUBLIC;

-- +goose Down
-- Refused for what the migrations before this would refuse as well. Guards go with what they are made of.
-- +goose StatementBegin
DO $$
DECLARE
    v_held text;
    p      record;
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
    UPDATE fence.protected_table SET guard = 'off';
    FOR p IN SELECT t.relation FROM fence.protected_table t ORDER BY t.relation::oid LOOP
        PERFORM fence.install_guard(p.relation);
    END LOOP;
    FOR p IN SELECT f.oid::regprocedure AS function FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
              WHERE n.nspname = 'fence' AND f.proname ~ '^guard_[0-9a-f]{32}$' LOOP
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
DROP FUNCTION fence.install_guard(regclass);
DROP FUNCTION fence.guard();
DROP FUNCTION fence.keys_of(regclass);
DROP FUNCTION fence.marked();
DROP FUNCTION fence.entered();
DROP FUNCTION fence.enter(text, uuid, bigint);
DROP FUNCTION fence.live_entered(text, uuid, bigint);
DROP FUNCTION fence.stamp_with(bigint);
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
