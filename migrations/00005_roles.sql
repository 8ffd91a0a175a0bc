-- Who may do what: the rights of an application, and of an auditor.

-- +goose Up
CREATE TABLE fence.allowed (
    role       name NOT NULL,
    what       text NOT NULL,
    allowed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (role, what),
    CONSTRAINT allowed_what CHECK (what IN ('holder', 'auditor'))
);
COMMENT ON TABLE fence.allowed IS 'roles that fence.allow() has given rights to, so that later versions can give them what is new';

-- fence.allow gives a role the rights of
--   holder:  an application. It acquires, renews, releases and writes, and its refusals are recorded. It reads no other
--            holder's token, moves no sequence, and writes into none of our tables but through functions that check.
--   auditor: fencecheck, and people. It reads everything but tokens and the secret, and changes nothing.
-- Protecting tables, and all that prunes and repairs, is the schema's owner's, who has to own those tables as well.
-- Call it in your own migration; called again it does no harm. It is the schema's owner's to call.
-- +goose StatementBegin
CREATE FUNCTION fence.allow(role name, what text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF allow.what IS NULL OR allow.what NOT IN ('holder', 'auditor') THEN
        RAISE EXCEPTION 'what %: want holder or auditor', coalesce(quote_literal(allow.what), 'NULL') USING ERRCODE = '22023';
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles r WHERE r.rolname = allow.role) THEN
        RAISE EXCEPTION 'role % does not exist', coalesce(quote_ident(allow.role), 'NULL') USING ERRCODE = '42704';
    END IF;
    INSERT INTO fence.allowed (role, what) VALUES (allow.role, allow.what) ON CONFLICT DO NOTHING;
    PERFORM fence.grant_allowed();
END $$;
-- +goose StatementEnd

-- fence.disallow takes all that fence.allow has given away again.
-- +goose StatementBegin
CREATE FUNCTION fence.disallow(role name) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    DELETE FROM fence.allowed a WHERE a.role = disallow.role;
    IF EXISTS (SELECT 1 FROM pg_roles r WHERE r.rolname = disallow.role) THEN
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA fence FROM %I', disallow.role);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA fence FROM %I', disallow.role);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fence FROM %I', disallow.role);
        EXECUTE format('REVOKE ALL ON SCHEMA fence FROM %I', disallow.role);
    END IF;
END $$;
-- +goose StatementEnd

-- fence.grant_allowed grants what the register of roles says. A migration that adds something which roles need replaces it
-- and calls it.
-- +goose StatementBegin
CREATE FUNCTION fence.grant_allowed() RETURNS void
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
                fence.audit_loss, fence.observation, fence.allowed, fence.fence_seq, fence.guard_refused, fence.guard_observed TO %I', a.role);
            IF to_regclass('fence.goose_db_version') IS NOT NULL THEN
                EXECUTE format('GRANT SELECT ON fence.goose_db_version TO %I', a.role);
            END IF;
        END CASE;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 5 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION
    fence.allow(name, text),
    fence.disallow(name),
    fence.grant_allowed()
FROM PUBLIC;

-- +goose Down
SELECT fence.refuse_down();
DROP FUNCTION fence.grant_allowed();
DROP FUNCTION fence.disallow(name);
DROP FUNCTION fence.allow(name, text);
DROP TABLE fence.allowed;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 4 $$;
-- +goose StatementEnd
