-- Leases: who may write, until when, under which fence.

-- +goose Up
CREATE SCHEMA IF NOT EXISTS fence;
COMMENT ON SCHEMA fence IS 'writegate: leases, fences and the audit of refused writes';

-- The source of fences. Steps of two leave an odd number under each fence: a sealed row holds fence - 1 and still
-- takes the sealer's one write. CACHE 1, because blocks cached per session hand out fences in the wrong order; a
-- ceiling of 2^53, because fences travel through JSON; no owner, because OWNED BY lets TRUNCATE … RESTART IDENTITY
-- rewind it and DROP TABLE take it along.
CREATE SEQUENCE fence.fence_seq AS bigint
    INCREMENT BY 2 MINVALUE 2 MAXVALUE 9007199254740990 START WITH 2 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE fence.fence_seq IS 'fences: each grant draws one while it holds its lease row';

-- One row a name. Nothing but the primary key is indexed, so that a renewal is a HOT update; half of each page is
-- left free for them. Collation C: names are compared by their bytes, whatever the database's locale.
CREATE TABLE fence.lease (
    name        text COLLATE "C" PRIMARY KEY,
    fence       bigint      NOT NULL DEFAULT 0,
    token       uuid,
    holder      text        NOT NULL DEFAULT '',
    ttl         interval    NOT NULL DEFAULT '0',
    granted_at  timestamptz,
    renewed_at  timestamptz,
    renewals    bigint      NOT NULL DEFAULT 0,
    expires_at  timestamptz NOT NULL DEFAULT '-infinity',
    released_at timestamptz,
    wanted_by   text,
    revoked     uuid[]      NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE fence.lease IS 'one row a lease: its newest grant, held while released_at is null and expires_at is ahead';
COMMENT ON COLUMN fence.lease.token IS 'proves "this grant is mine" to renew and release; orders nothing';
COMMENT ON COLUMN fence.lease.revoked IS 'tokens under which nothing is to be granted any more, the newest first';
COMMENT ON COLUMN fence.lease.wanted_by IS 'a client that waits for this term to end; release notifies only if set';

CREATE TABLE fence.term (
    fence            bigint PRIMARY KEY,
    name             text COLLATE "C" NOT NULL,
    holder           text        NOT NULL,
    ttl              interval    NOT NULL,
    granted_at       timestamptz NOT NULL,
    renewals         bigint      NOT NULL DEFAULT 0,
    ended_at         timestamptz,
    end_reason       text,
    application_name text        NOT NULL DEFAULT '',
    client_addr      inet,
    db_user          name        NOT NULL DEFAULT session_user
) WITH (fillfactor = 90);
CREATE INDEX term_name_fence_idx ON fence.term (name, fence);
COMMENT ON TABLE fence.term IS 'the history: one row a grant; ended_at is null while nobody has ended or followed it';

-- Where fences came from, and when that changed. A failover, a restore or a storage snapshot takes the sequence back in
-- time while grants that it forgot are still held; each grant compares this stamp with the server, and jumps ahead of
-- anything that can be out there when they differ.
CREATE TABLE fence.epoch (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    began_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason            text        NOT NULL,
    server_started_at timestamptz NOT NULL,
    timeline          text,
    system_identifier bigint,
    sequence_file     text        NOT NULL,
    jumped_from       bigint,
    jumped_to         bigint
);
COMMENT ON TABLE fence.epoch IS 'each change of what fences come from, the newest last, and how far they jumped for it';
COMMENT ON COLUMN fence.epoch.sequence_file IS 'names the database, and is another once the sequence has been altered, or restarted, which may go back';
COMMENT ON COLUMN fence.epoch.timeline IS 'null where this server does not let us read it; restarts are still noticed';

-- fence.timeline returns the WAL timeline, null where it cannot be read. Not from the control file: that shows the old
-- timeline for minutes after a promotion. Managed services may have revoked the functions, and other engines lack them.
-- +goose StatementBegin
CREATE FUNCTION fence.timeline() RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- What this server was when there was nothing to be granted yet: one that takes over and has heard of no grant at all, not even
-- of the first, which it was promoted too early for, still sees that it is another.
INSERT INTO fence.epoch (reason, server_started_at, timeline, sequence_file)
VALUES ('installed', pg_postmaster_start_time(), fence.timeline(), pg_relation_filepath('fence.fence_seq'));

-- fence.sequence_wrong says what is wrong with the sequence, by which it could hand out fences in the wrong order, or twice; '' if nothing.
-- +goose StatementBegin
CREATE FUNCTION fence.sequence_wrong() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(', ',
               CASE WHEN s.seqtypid <> 'bigint'::regtype THEN 'is not bigint' END,
               CASE WHEN s.seqincrement <> 2 THEN format('increments by %s, not 2', s.seqincrement) END,
               CASE WHEN s.seqcache <> 1 THEN format('caches %s values a session, not 1', s.seqcache) END,
               CASE WHEN s.seqcycle THEN 'cycles' END,
               CASE WHEN c.relpersistence <> 'p' THEN 'is not logged' END,
               CASE WHEN EXISTS (SELECT 1 FROM pg_depend d
                                  WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
                                    AND d.refclassid = 'pg_class'::regclass AND d.refobjsubid > 0
                                    AND d.deptype IN ('a', 'i'))
                    THEN 'is owned by a table''s column' END)
      FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
     WHERE s.seqrelid = 'fence.fence_seq'::regclass
$$;
-- +goose StatementEnd

-- fence.jump moves the sequence past every fence that can be out there, and logs a new epoch: the greater of all that is
-- known here plus 2^20, and the microseconds since 1970. Fences grow more slowly than one a microsecond, so the clock is
-- ahead of every fence ever lost, also of those that a twin, promoted apart from us, has handed out; a count of epochs
-- would not be. It returns the value that the sequence stands at; the next fence is above it.
-- For an operator's hand: after restoring data into a running server, which nothing here can notice.
-- +goose StatementBegin
CREATE FUNCTION fence.jump(reason text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_drawn    bigint;
    v_seen     bigint;
    v_register bigint;
    v_to       bigint;
    v_system   bigint;
BEGIN
    LOCK TABLE fence.epoch IN SHARE ROW EXCLUSIVE MODE;
    SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END INTO v_drawn FROM fence.fence_seq q;
    SELECT greatest(v_drawn, (SELECT max(l.fence) FROM fence.lease l), (SELECT max(t.fence) FROM fence.term t)) INTO v_seen;
    IF to_regclass('fence.protected_table') IS NOT NULL THEN
        EXECUTE 'SELECT max(p.high_water) FROM fence.protected_table p' INTO v_register;
        v_seen := greatest(v_seen, v_register);
    END IF;
    IF v_seen > 9007199254740990 - 1048576 THEN
        RAISE EXCEPTION 'fences are used up: % is known here, and they stay below 2^53', v_seen USING ERRCODE = 'WG001';
    END IF;
    v_to := greatest(v_seen + 1048576, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    v_to := v_to + v_to % 2;
    IF v_to >= 9007199254740990 THEN
        RAISE EXCEPTION 'fences are used up: a jump to % would pass 2^53', v_to USING ERRCODE = 'WG001';
    END IF;
    BEGIN
        SELECT c.system_identifier INTO v_system FROM pg_control_system() c;
    EXCEPTION WHEN OTHERS THEN
        v_system := NULL;
    END;
    PERFORM setval('fence.fence_seq', v_to);
    INSERT INTO fence.epoch (reason, server_started_at, timeline, system_identifier, sequence_file, jumped_from, jumped_to)
    VALUES (jump.reason, pg_postmaster_start_time(), fence.timeline(), v_system,
            -- What is wrong with it is not to pass for what it always was: the next grant asks.
            CASE WHEN fence.sequence_wrong() = '' THEN pg_relation_filepath('fence.fence_seq') ELSE 'altered' END, v_drawn, v_to);
    RETURN v_to;
END $$;
-- +goose StatementEnd

-- fence.check_source makes sure that the next fence will be above all others: it raises WG001 if the sequence has been
-- tampered with, and jumps if what fences come from is not what it was at the last grant. fence.acquire calls it where a first
-- look shows that something is not as it was.
-- +goose StatementBegin
CREATE FUNCTION fence.check_source() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_wrong    text := fence.sequence_wrong();
    v_first    boolean;
    v_behind   boolean;
    v_timeline text := fence.timeline();
    v_file     text := pg_relation_filepath('fence.fence_seq');
    v_reason   text;
    e          record;
BEGIN
    IF v_wrong <> '' THEN
        RAISE EXCEPTION 'fence.fence_seq cannot be trusted: it %', v_wrong USING ERRCODE = 'WG001',
            HINT = 'ALTER SEQUENCE fence.fence_seq INCREMENT BY 2 CACHE 1 NO CYCLE OWNED BY NONE; then SELECT fence.jump(''sequence repaired'')';
    END IF;

    FOR attempt IN 1..2 LOOP
        SELECT x.reason, x.server_started_at = pg_postmaster_start_time() AS same_start,
               x.timeline IS NOT DISTINCT FROM v_timeline AS same_timeline, x.sequence_file = v_file AS same_file, x.sequence_file
          INTO e FROM fence.epoch x ORDER BY x.id DESC LIMIT 1;
        v_first := NOT FOUND;
        IF e.reason = 'installed' THEN
            -- Elsewhere, or later, all that was ever granted may have been lost. Another database of this very server is a
            -- copy of one that had granted nothing.
            v_first := e.same_start AND e.same_timeline;
        ELSIF e.same_start AND e.same_timeline AND e.same_file THEN
            RETURN;
        END IF;
        -- Only one of those who notice jumps; the others look again, once they have waited for it.
        IF attempt = 1 THEN
            LOCK TABLE fence.epoch IN SHARE ROW EXCLUSIVE MODE;
        END IF;
    END LOOP;

    IF v_first THEN
        -- Where nothing was ever granted there is nothing to jump over; where the leases were copied from elsewhere
        -- without their sequence, there is.
        SELECT max(f.fence) > (SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END FROM fence.fence_seq q)
          INTO v_behind
          FROM (SELECT max(l.fence) AS fence FROM fence.lease l UNION ALL SELECT max(t.fence) FROM fence.term t) f;
        DELETE FROM fence.epoch x WHERE x.reason = 'installed'; -- which the following takes the place of
        IF v_behind THEN
            PERFORM fence.jump('first grant here, and the sequence is behind the leases');
            RETURN;
        END IF;
        INSERT INTO fence.epoch (reason, server_started_at, timeline, sequence_file)
        VALUES ('first grant here', pg_postmaster_start_time(), v_timeline, v_file);
    ELSE
        v_reason := concat_ws(', ',
            CASE WHEN NOT e.same_start THEN 'the server was started' END,
            CASE WHEN NOT e.same_timeline THEN 'the timeline changed' END,
            CASE WHEN NOT e.same_file THEN format('the sequence is %s, and was %s', v_file, e.sequence_file) END);
        PERFORM fence.jump(v_reason);
    END IF;
    IF v_timeline IS NULL THEN
        -- Once an epoch. Not a WARNING: one at a grant means that its commit was not replicated.
        RAISE NOTICE 'writegate: the WAL timeline cannot be read here; a promotion is noticed only if the server was restarted for it'
            USING HINT = 'GRANT EXECUTE ON FUNCTION pg_walfile_name(pg_lsn), pg_current_wal_lsn() to the owner of schema fence.';
    END IF;
END $$;
-- +goose StatementEnd

-- fence.add_lease makes the row of a lease that nobody has held yet, if nobody else does.
-- +goose StatementBegin
CREATE FUNCTION fence.add_lease(name text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    -- Not a constraint, which would be asked at each renewal.
    IF add_lease.name IS NULL OR octet_length(add_lease.name) NOT BETWEEN 1 AND 255 OR add_lease.name ~ '[\u0001-\u001f\u007f-\u009f]' THEN
        RAISE EXCEPTION 'lease name of % bytes: want 1 to 255 bytes without control characters',
            coalesce(octet_length(add_lease.name), 0) USING ERRCODE = '22023';
    END IF;
    INSERT INTO fence.lease (name) VALUES (add_lease.name) ON CONFLICT DO NOTHING;
END $$;
-- +goose StatementEnd

-- fence.acquire tries once to take a lease, and never waits for its holder.
--
-- Call it as a statement of its own, outside any transaction block, and trust the fence only once that statement has
-- returned: a fence that was seen inside an open transaction can be issued again after a crash. The token is the
-- caller's (a random uuid, new for each grant); the same token again returns the same grant while that lasts, which
-- makes a retry after a lost reply safe.
--
-- Not granted: fence and holder are the present holder's, remaining is what its lease still has by this server's
-- clock. With waiter set the caller says that it is going to wait: the first to say so in a term is remembered, is
-- told next_in_line, and is named by the notification on channel "fence_release" that ends the term.
--
-- Errors: 22023 for arguments that cannot be; 55P03 when the row stayed locked for lock_wait; WG001 when the sequence
-- cannot be trusted, or yields a fence that is not above all that were granted; WG002 when the isolation level is not READ COMMITTED;
-- 2200H when fences are used up.
-- +goose StatementBegin
CREATE FUNCTION fence.acquire(
    name text, holder text, ttl interval, token uuid,
    lock_wait interval DEFAULT '1 second', waiter text DEFAULT NULL,
    OUT granted boolean, OUT fence bigint, OUT expires_at timestamptz, OUT remaining interval,
    OUT held_by text, OUT next_in_line boolean
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r      record;
    s      record;
    v_now  timestamptz;
    v_set  text;
    v_same boolean;
BEGIN
    -- In as few expressions as can be, here and below: each is set up anew in every transaction.
    IF (now() + acquire.ttl > now() AND acquire.ttl <= interval '7 days' AND acquire.token IS NOT NULL
        AND acquire.lock_wait BETWEEN interval '1 millisecond' AND interval '1 day'
        AND coalesce(octet_length(acquire.holder), 0) <= 1024 AND coalesce(octet_length(acquire.waiter), 0) <= 255
        AND current_setting('transaction_isolation') = 'read committed') IS NOT TRUE THEN
        -- By what it makes of the time: a month less 30 days is 0 as intervals compare, and may be in the past.
        IF acquire.ttl IS NULL OR now() + acquire.ttl <= now() OR acquire.ttl > interval '7 days' THEN
            RAISE EXCEPTION 'ttl %: want more than 0 and at most 7 days', coalesce(acquire.ttl::text, 'NULL')
                USING ERRCODE = '22023';
        ELSIF acquire.token IS NULL THEN
            RAISE EXCEPTION 'token NULL: want a random uuid, new for each grant' USING ERRCODE = '22023';
        ELSIF acquire.lock_wait IS NULL OR acquire.lock_wait NOT BETWEEN interval '1 millisecond' AND interval '1 day' THEN
            RAISE EXCEPTION 'lock_wait %: want a millisecond to a day', coalesce(acquire.lock_wait::text, 'NULL')
                USING ERRCODE = '22023';
        ELSIF octet_length(acquire.holder) > 1024 OR octet_length(acquire.waiter) > 255 THEN
            RAISE EXCEPTION 'holder of % and waiter of % bytes: want at most 1024 and 255', octet_length(acquire.holder),
                coalesce(octet_length(acquire.waiter), 0) USING ERRCODE = '22023';
        END IF;
        -- Under a snapshot that does not move, what is read after the lock may be older than the lock.
        RAISE EXCEPTION 'isolation level %: fence.acquire needs READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED; SELECT … FROM fence.acquire(…); COMMIT';
    END IF;
    next_in_line := false;
    -- Transaction-local, so that nothing leaks into a pooled session. An assignment: PERFORM would be a query.
    v_set := set_config('lock_timeout', ceil(extract(epoch FROM acquire.lock_wait) * 1000)::bigint::text, true);

    -- What is free, and what nobody is at, is had without waiting; what is not found so may be locked, or held, or not be there.
    -- The condition holds for the row as it is once it is locked. What has expired stays so; all else is asked again below.
    SELECT l.ctid AS at, l.fence, l.token, l.holder, l.expires_at, l.released_at, l.renewals, l.revoked INTO r
      FROM fence.lease l
     WHERE l.name = acquire.name AND (l.released_at IS NOT NULL OR l.expires_at <= clock_timestamp())
       FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- A look without a lock: one who must wait need not queue on the row, nor write a lock into it. What it
        -- says of a running lease was true when it was read; only a grant needs more, and gets it below.
        SELECT l.fence, l.token, l.holder, l.expires_at, l.released_at, l.wanted_by INTO r
          FROM fence.lease l WHERE l.name = acquire.name;
        v_now := clock_timestamp();
        IF r.released_at IS NULL AND r.expires_at > v_now AND r.token <> acquire.token THEN
            granted := false;
            IF acquire.waiter IS NOT NULL AND r.wanted_by IS NULL THEN
                -- Skipping a locked row is right: whoever holds it may be ending the term, and we come back soon.
                UPDATE fence.lease l SET wanted_by = acquire.waiter
                 WHERE l.name = (SELECT k.name FROM fence.lease k
                                  WHERE k.name = acquire.name AND k.fence = r.fence AND k.released_at IS NULL
                                    AND k.wanted_by IS NULL
                                    FOR NO KEY UPDATE SKIP LOCKED);
                next_in_line := FOUND;
            ELSE
                next_in_line := coalesce(r.wanted_by = acquire.waiter, false);
            END IF;
            fence := r.fence; held_by := r.holder; expires_at := r.expires_at; remaining := r.expires_at - v_now;
            RETURN;
        END IF;

        LOOP
            SELECT l.ctid AS at, l.fence, l.token, l.holder, l.expires_at, l.released_at, l.renewals, l.revoked INTO r
              FROM fence.lease l WHERE l.name = acquire.name FOR UPDATE;
            EXIT WHEN FOUND;
            -- FOR UPDATE locks nothing where there is no row, so the first acquirers of a name meet here.
            PERFORM fence.add_lease(acquire.name);
        END LOOP;
    END IF;

    -- After the lock, in a statement of its own: every earlier reading is from before the wait.
    v_now := clock_timestamp();

    IF r.released_at IS NULL AND r.expires_at > v_now THEN
        granted := (r.token = acquire.token);
        fence := r.fence; held_by := r.holder; expires_at := r.expires_at; remaining := r.expires_at - v_now;
        RETURN;
    END IF;
    IF r.token = acquire.token OR acquire.token = ANY (r.revoked) THEN
        RAISE EXCEPTION 'the grant of this token has ended, or was given up: a token serves one grant only'
            USING ERRCODE = '22023';
    END IF;

    -- A grant that a crash can undo is a fence that can be issued twice, so asynchronous commit is overruled here.
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        v_set := set_config('synchronous_commit', 'on', true);
    END IF;

    -- Is all that fences come from as it was at the last grant? And what is the newest? That is read before the fence is drawn:
    -- whatever was granted by then was drawn earlier, and has to be lower.
    SELECT x.timeline, x.server_started_at = pg_postmaster_start_time()
           AND x.sequence_file = pg_relation_filepath('fence.fence_seq'::regclass) AND x.reason <> 'installed'
           AND NOT EXISTS (SELECT 1 FROM pg_depend d -- it belongs to a column: all else that can be altered makes another file
                            WHERE d.classid = 'pg_class'::regclass AND d.objid = 'fence.fence_seq'::regclass AND d.refobjsubid > 0) AS same,
           greatest(r.fence, (SELECT t.fence FROM fence.term t ORDER BY t.fence DESC LIMIT 1)) AS granted
      INTO s FROM fence.epoch x ORDER BY x.id DESC LIMIT 1;
    IF s.same AND s.timeline IS NOT NULL THEN -- as in fence.timeline, whose call, and whose block, would cost more than the rest of this
        IF has_function_privilege('pg_walfile_name(pg_lsn)'::regprocedure::oid, 'execute')
           AND has_function_privilege('pg_current_wal_lsn()'::regprocedure::oid, 'execute') THEN
            v_same := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) = s.timeline;
        END IF;
    END IF;
    IF v_same IS NOT TRUE THEN
        PERFORM fence.check_source();
    END IF;
    fence := nextval('fence.fence_seq');
    IF fence <= coalesce(s.granted, r.fence) OR fence % 2 <> 0 THEN
        RAISE EXCEPTION 'fence % drawn for lease "%" is not an even number above the last one granted, %', fence, acquire.name, coalesce(s.granted, r.fence)
            USING ERRCODE = 'WG001',
                  DETAIL = 'The sequence fence.fence_seq is behind the leases: it was reset, restored, or not replicated.',
                  HINT = 'SELECT fence.jump(''why'') moves it above every fence in use.';
    END IF;

    expires_at := v_now + acquire.ttl;
    held_by := coalesce(acquire.holder, '');
    IF r.fence > 0 AND r.released_at IS NULL THEN -- else its end is on record
        UPDATE fence.term t
           SET ended_at = r.expires_at, end_reason = 'expired', renewals = r.renewals
         WHERE t.fence = r.fence AND t.ended_at IS NULL;
    END IF;
    WITH granted AS ( -- in one statement, which costs less than two
        UPDATE fence.lease l
           SET fence = acquire.fence, token = acquire.token, holder = held_by, ttl = acquire.ttl,
               granted_at = v_now, renewed_at = v_now, renewals = 0, expires_at = acquire.expires_at,
               released_at = NULL, wanted_by = NULL
         WHERE l.ctid = r.at) -- a row that is locked stays where it is
    INSERT INTO fence.term (fence, name, holder, ttl, granted_at, application_name, client_addr, db_user)
    VALUES (acquire.fence, acquire.name, held_by, acquire.ttl, v_now,
            current_setting('application_name'), inet_client_addr(), session_user);

    granted := true; remaining := acquire.ttl;
END $$;
-- +goose StatementEnd

-- fence.renew extends the given grants, each by its own ttl from now, and answers for each name:
--   renewed  expires_at is its new end
--   lost     it is over for good: expired, released, or somebody else's; nothing was changed
--   locked   another session held the row just then; nothing was changed, ask again soon
-- It never waits for a lock: one row that somebody sits on must not cost all the others their renewal.
-- +goose StatementBegin
CREATE FUNCTION fence.renew(names text[], tokens uuid[])
RETURNS TABLE (name text, outcome text, expires_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_rows  tid[];
    v_now   timestamptz;
    v_count integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'isolation level %: fence.renew needs READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED; SELECT … FROM fence.renew(…); COMMIT';
    END IF;

    -- What waits for nothing cannot deadlock, in whatever order. FOR NO KEY UPDATE passes by the FOR KEY SHARE of a write
    -- in flight: a heartbeat never waits for the holder's own work.
    SELECT array_agg(s.at) INTO v_rows
      FROM (SELECT l.ctid AS at
              FROM unnest(renew.names, renew.tokens) AS u (name, token)
              JOIN fence.lease l ON l.name = u.name COLLATE "C" AND l.token = u.token
               FOR NO KEY UPDATE OF l SKIP LOCKED) s;

    v_now := clock_timestamp();

    -- A row that is locked stays where it is, so that there is no need to look for it again.
    RETURN QUERY
    UPDATE fence.lease l
       SET expires_at = v_now + l.ttl, renewed_at = v_now, renewals = l.renewals + 1
     WHERE l.ctid = ANY (v_rows) AND l.released_at IS NULL AND l.expires_at > v_now
    RETURNING l.name, 'renewed', l.expires_at;
    GET DIAGNOSTICS v_count = ROW_COUNT;

    IF v_count < cardinality(renew.names) THEN
        -- What has been renewed is what was renewed just now: of another's renewal at this very microsecond it would be as true.
        RETURN QUERY
        SELECT u.name, CASE WHEN l.name IS NULL THEN 'lost' ELSE 'locked' END, NULL::timestamptz
          FROM (SELECT DISTINCT x.name, x.token FROM unnest(renew.names, renew.tokens) AS x (name, token)) u
          LEFT JOIN fence.lease l ON l.name = u.name COLLATE "C" AND l.token = u.token AND l.released_at IS NULL AND l.expires_at > v_now
         WHERE l.renewed_at IS DISTINCT FROM v_now;
    END IF;
END $$;
-- +goose StatementEnd

-- fence.release ends a grant and answers:
--   released  it was held, and is free now; the same again for a release that was sent twice
--   expired   it was the newest grant but had expired already; it is free now
--   not_held  it is somebody else's, or was never granted; nothing was changed
-- Only the token counts. With fence given, a grant that has been followed by another is still told how it ended.
-- Writes in flight under this grant do not hold a release up; they hold up the next grant.
--
-- revoke is for a caller whose acquire was never answered: should that statement still be on its way, or wait for the
-- row's lock, then nothing is granted under its token when it gets there.
-- +goose StatementBegin
CREATE FUNCTION fence.release(
    name text, token uuid, fence bigint DEFAULT NULL, lock_wait interval DEFAULT '1 second', revoke boolean DEFAULT false
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r         record;
    v_now     timestamptz;
    v_outcome text;
BEGIN
    IF (release.token IS NOT NULL AND release.lock_wait BETWEEN interval '1 millisecond' AND interval '1 day'
        AND current_setting('transaction_isolation') = 'read committed') IS NOT TRUE THEN
        IF release.token IS NULL THEN
            RAISE EXCEPTION 'token NULL: want that of the grant' USING ERRCODE = '22023';
        ELSIF release.lock_wait IS NULL OR release.lock_wait NOT BETWEEN interval '1 millisecond' AND interval '1 day' THEN
            RAISE EXCEPTION 'lock_wait %: want a millisecond to a day', coalesce(release.lock_wait::text, 'NULL')
                USING ERRCODE = '22023';
        END IF;
        RAISE EXCEPTION 'isolation level %: fence.release needs READ COMMITTED', current_setting('transaction_isolation')
            USING ERRCODE = 'WG002', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED; SELECT fence.release(…); COMMIT';
    END IF;
    v_outcome := set_config('lock_timeout', ceil(extract(epoch FROM release.lock_wait) * 1000)::bigint::text, true); -- PERFORM would be a query

    IF release.revoke THEN -- whose mark needs a row to be in
        PERFORM fence.add_lease(release.name);
    END IF;
    -- To be revoked it may be granted only while we wait for the row: so one look, which sees what it has waited for.
    SELECT l.ctid AS at, l.fence, l.token, l.renewals, l.expires_at, l.released_at, l.wanted_by INTO r
      FROM fence.lease l
     WHERE l.name = release.name AND (l.token = release.token OR release.revoke)
       FOR NO KEY UPDATE;
    v_now := clock_timestamp();

    IF (r.token = release.token) IS NOT TRUE THEN
        IF release.revoke THEN
            -- Some are enough: a statement can be late by a connection's life, not by that of many.
            UPDATE fence.lease l SET revoked = (release.token || l.revoked)[1:16] WHERE l.name = release.name;
        END IF;
        PERFORM 1 FROM fence.term t
          WHERE t.fence = release.fence AND t.name = release.name AND t.end_reason = 'released';
        RETURN CASE WHEN FOUND THEN 'released' ELSE 'not_held' END;
    ELSIF r.released_at IS NOT NULL THEN
        SELECT t.end_reason INTO v_outcome FROM fence.term t WHERE t.fence = r.fence;
        RETURN coalesce(v_outcome, 'released');
    END IF;

    v_outcome := CASE WHEN r.expires_at > v_now THEN 'released' ELSE 'expired' END;
    WITH ended AS ( -- as in fence.acquire
        UPDATE fence.lease l
           SET released_at = v_now, expires_at = least(r.expires_at, v_now), wanted_by = NULL
         WHERE l.ctid = r.at)
    UPDATE fence.term t
       SET ended_at = least(r.expires_at, v_now), end_reason = v_outcome, renewals = r.renewals
     WHERE t.fence = r.fence AND t.ended_at IS NULL;

    -- A transaction with a pending notification serializes its commit with all others that have one, so this is
    -- sent only where somebody said that it waits, and is a hint only: waiters poll.
    IF r.wanted_by IS NOT NULL THEN
        PERFORM pg_notify('fence_release', json_build_object('name', release.name, 'next', r.wanted_by)::text);
    END IF;
    RETURN v_outcome;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 1 $$;
-- +goose StatementEnd
COMMENT ON FUNCTION fence.schema_version() IS 'the newest writegate migration applied here, by whatever tool';

REVOKE ALL ON FUNCTION
    fence.timeline(),
    fence.sequence_wrong(),
    fence.jump(text),
    fence.check_source(),
    fence.add_lease(text),
    fence.acquire(text, text, interval, uuid, interval, text),
    fence.renew(text[], uuid[]),
    fence.release(text, uuid, bigint, interval, boolean)
FROM PUBLIC;

-- +goose Down
DROP FUNCTION fence.schema_version();
DROP FUNCTION fence.release(text, uuid, bigint, interval, boolean);
DROP FUNCTION fence.renew(text[], uuid[]);
DROP FUNCTION fence.acquire(text, text, interval, uuid, interval, text);
DROP FUNCTION fence.add_lease(text);
DROP FUNCTION fence.check_source();
DROP FUNCTION fence.jump(text);
DROP FUNCTION fence.sequence_wrong();
DROP FUNCTION fence.timeline();
DROP TABLE fence.epoch;
DROP TABLE fence.term;
DROP TABLE fence.lease;
DROP SEQUENCE fence.fence_seq;
-- goose may keep its own history in this schema, and still has to write there that this migration is gone; `fencecheck
-- migrate down` removes that table, and the schema with it, afterwards.
-- +goose StatementBegin
DO $$
BEGIN
    DROP SCHEMA fence;
EXCEPTION WHEN dependent_objects_still_exist THEN
    NULL;
END $$;
-- +goose StatementEnd
