-- Setting the source of fences right by hand, where nothing here can notice that it has to be.

-- +goose Up
-- fence.repair moves the sequence past every fence that this database holds anywhere, protected tables included, and logs
-- why. Rows may have come without the sequence, or the sequence may have been taken back: logical replication, a dump of
-- selected tables, a restore of data into a running server, setval, TRUNCATE … RESTART IDENTITY. It reads the protected
-- tables, which takes as long as that takes. Safe while leases are granted: a fence drawn meanwhile is below those that
-- follow. It returns what the sequence stands at.
-- +goose StatementBegin
CREATE FUNCTION fence.repair(reason text DEFAULT 'repaired by hand') RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE fence.protected_table p SET high_water = h.max_fence
      FROM fence.tables_holding_fences() h WHERE h.relation = p.relation AND h.max_fence > p.high_water;
    -- A tombstone is a row as well.
    UPDATE fence.protected_table p SET high_water = t.fence
      FROM (SELECT x.relation, max(x.fence) AS fence FROM fence.tombstone x GROUP BY x.relation) t
     WHERE t.relation = p.relation AND t.fence > p.high_water;
    RETURN fence.jump(repair.reason);
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 6 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION fence.repair(text) FROM PUBLIC;

-- +goose Down
SELECT fence.refuse_down();
DROP FUNCTION fence.repair(text);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 5 $$;
-- +goose StatementEnd
