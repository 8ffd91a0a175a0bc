-- Keeping the audit to a size, without losing count.

-- +goose Up
-- What has been pruned from the audit stays counted: a sum of refusals that falls would be taken for a restart by whoever
-- watches it, and one that is smaller than it was for good news.
CREATE TABLE fence.pruned (
    what       text   NOT NULL,
    table_name text   NOT NULL DEFAULT '',
    reason     text   NOT NULL DEFAULT '',
    lawful     boolean NOT NULL DEFAULT false,
    row_count  bigint NOT NULL,
    count      bigint NOT NULL,
    max_fence  bigint NOT NULL DEFAULT 0,
    last_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (what, table_name, reason, lawful),
    CONSTRAINT pruned_what CHECK (what IN ('rejection', 'term', 'audit_loss'))
);
COMMENT ON TABLE fence.pruned IS 'how many rejections, terms and audit losses have been pruned, and up to which fence';

-- fence.prune_audit deletes what is older than keep of the audit: rejections by their last refusal, terms by their end, audit
-- losses and observations. At most batch of each; it returns how many, and is to be called again until all are 0. The newest
-- term of all, and that of each lease, stay, however old: grants compare with them. Less than a day is refused.
-- +goose StatementBegin
CREATE FUNCTION fence.prune_audit(keep interval DEFAULT '90 days', batch integer DEFAULT 10000,
    OUT rejections bigint, OUT terms bigint, OUT audit_losses bigint, OUT observations bigint)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz := clock_timestamp() - prune_audit.keep;
BEGIN
    IF prune_audit.keep IS NULL OR prune_audit.keep < interval '1 day' THEN
        RAISE EXCEPTION 'keep %: want 1 day or more', coalesce(prune_audit.keep::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    IF prune_audit.batch IS NULL OR prune_audit.batch < 1 THEN
        RAISE EXCEPTION 'batch %: want 1 or more', coalesce(prune_audit.batch::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    -- One that prunes at a time: two would add to the same counts.
    LOCK TABLE fence.pruned IN SHARE ROW EXCLUSIVE MODE;
    WITH gone AS (
        DELETE FROM fence.rejection r WHERE r.ctid = ANY (ARRAY(
            SELECT x.ctid FROM fence.rejection x WHERE x.last_at < v_before
             ORDER BY x.last_at, x.id LIMIT prune_audit.batch FOR UPDATE SKIP LOCKED))
        RETURNING r.table_name, r.reason, r.verdict = 'lawful' AS lawful, r.count, r.fence
    ), counted AS (
        INSERT INTO fence.pruned AS p (what, table_name, reason, lawful, row_count, count, max_fence)
        SELECT 'rejection', g.table_name, g.reason, g.lawful, count(*), sum(g.count), max(g.fence) FROM gone g GROUP BY 2, 3, 4
        ON CONFLICT (what, table_name, reason, lawful) DO UPDATE
           SET row_count = p.row_count + excluded.row_count, count = p.count + excluded.count,
               max_fence = greatest(p.max_fence, excluded.max_fence), last_at = excluded.last_at
    )
    SELECT count(*) INTO rejections FROM gone;
    WITH gone AS (
        DELETE FROM fence.term t WHERE t.ctid = ANY (ARRAY(
            SELECT x.ctid FROM fence.term x
             WHERE x.ended_at < v_before AND x.fence < (SELECT max(y.fence) FROM fence.term y)
               AND NOT EXISTS (SELECT 1 FROM fence.lease l WHERE l.name = x.name AND l.fence = x.fence)
             ORDER BY x.fence LIMIT prune_audit.batch FOR UPDATE OF x SKIP LOCKED))
        RETURNING t.fence
    ), counted AS (
        INSERT INTO fence.pruned AS p (what, row_count, count, max_fence)
        SELECT 'term', count(*), count(*), max(g.fence) FROM gone g HAVING count(*) > 0
        ON CONFLICT (what, table_name, reason, lawful) DO UPDATE
           SET row_count = p.row_count + excluded.row_count, count = p.count + excluded.count,
               max_fence = greatest(p.max_fence, excluded.max_fence), last_at = excluded.last_at
    )
    SELECT count(*) INTO terms FROM gone;
    WITH gone AS (
        DELETE FROM fence.audit_loss a WHERE a.last_at < v_before RETURNING a.count
    ), counted AS (
        INSERT INTO fence.pruned AS p (what, row_count, count)
        SELECT 'audit_loss', count(*), sum(g.count) FROM gone g HAVING count(*) > 0
        ON CONFLICT (what, table_name, reason, lawful) DO UPDATE
           SET row_count = p.row_count + excluded.row_count, count = p.count + excluded.count, last_at = excluded.last_at
    )
    SELECT count(*) INTO audit_losses FROM gone;
    DELETE FROM fence.observation o WHERE o.ctid = ANY (ARRAY(
        SELECT x.ctid FROM fence.observation x WHERE x.first_at < v_before LIMIT prune_audit.batch FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS observations = ROW_COUNT;
END $$;
-- +goose StatementEnd

-- As before, and what is new here.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.grant_allowed() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    a record;
BEGIN
    FOR a IN SELECT x.role, x.what FROM fence.allowed x JOIN pg_roles r ON r.rolname = x.role ORDER BY x.role, x.what LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA fence TO %I', a.role);
        CASE a.what
        WHEN 'holder' THEN
            EXECUTE format('GRANT SELECT ON fence.protected_table, fence.live_lease TO %I', a.role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION fence.acquire, fence.renew, fence.release, fence.live, fence.dear, fence.enter,
                fence.lease_state, fence.pin, fence.no_longer, fence.transaction_fate, fence.floor, fence.buried, fence.bury, fence.request_is_new,
                fence.request_applied, fence.request_result, fence.record_rejections TO %I', a.role);
        WHEN 'auditor' THEN
            EXECUTE format('GRANT SELECT (name, fence, holder, ttl, granted_at, renewed_at, renewals, expires_at, released_at, wanted_by)
                ON fence.lease TO %I', a.role);
            EXECUTE format('GRANT SELECT ON fence.term, fence.epoch, fence.protected_table, fence.rejection, fence.tombstone, fence.request,
                fence.audit_loss, fence.observation, fence.allowed, fence.pruned, fence.fence_seq, fence.guard_refused, fence.guard_observed TO %I', a.role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION fence.keys_of TO %I', a.role);
            IF to_regclass('fence.goose_db_version') IS NOT NULL THEN
                EXECUTE format('GRANT SELECT ON fence.goose_db_version TO %I', a.role);
            END IF;
        END CASE;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 7 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION fence.prune_audit(interval, integer) FROM PUBLIC;
SELECT fence.grant_allowed();

-- +goose Down
SELECT fence.refuse_down();
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE replace(replace(pg_get_functiondef('fence.grant_allowed()'::regprocedure), 'fence.pruned, ', ''),
                    'EXECUTE format(''GRANT EXECUTE ON FUNCTION fence.keys_of TO %I'', a.role);', '');
END $$;
-- +goose StatementEnd
DROP FUNCTION fence.prune_audit(interval, integer);
DROP TABLE fence.pruned;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 6 $$;
-- +goose StatementEnd
