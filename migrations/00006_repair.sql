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

-- fence.source_findings says what is wrong with the source of fences, if anything: one row for each finding, with an id
-- that does not change between versions. It reads the protected tables.
-- +goose StatementBegin
CREATE FUNCTION fence.source_findings() RETURNS TABLE (id text, finding text)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_last bigint;
    v_max  bigint;
    s      record;
    h      record;
    p      record;
BEGIN
    SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END INTO v_last FROM fence.fence_seq q;
    SELECT x.seqtypid, x.seqincrement, x.seqcache, x.seqcycle, x.seqmax, c.relpersistence INTO s
      FROM pg_sequence x JOIN pg_class c ON c.oid = x.seqrelid WHERE x.seqrelid = 'fence.fence_seq'::regclass;
    id := 'sequence-definition';
    IF s.seqtypid <> 'bigint'::regtype OR s.seqincrement <> 2 OR s.seqcache <> 1 OR s.seqcycle OR s.relpersistence <> 'p'
       OR s.seqmax > 9007199254740991 THEN
        finding := 'fence.fence_seq is not as it was made: want bigint, increment 2, cache 1, no cycle, logged, at most 2^53; grants refuse it';
        RETURN NEXT;
    END IF;
    id := 'sequence-behind';
    FOR h IN SELECT 'fence.lease' AS source, max(l.fence) AS max_fence FROM fence.lease l
             UNION ALL SELECT 'fence.term', max(t.fence) FROM fence.term t
             UNION ALL SELECT 'fence.tombstone of ' || b.relation::text, max(b.fence) FROM fence.tombstone b GROUP BY b.relation
    LOOP
        IF h.max_fence > v_last THEN
            finding := format('%s holds fences up to %s, and the next that is granted is %s: its holder would be refused', h.source, h.max_fence, v_last + 2);
            RETURN NEXT;
        END IF;
    END LOOP;
    FOR p IN SELECT x.relation, x.fence_column FROM fence.protected_table x ORDER BY x.relation::oid LOOP
        BEGIN
            EXECUTE format('SELECT max(%I) FROM %s', p.fence_column, p.relation) INTO v_max;
            IF v_max > v_last THEN
                id := 'sequence-behind';
                finding := format('%s holds fences up to %s, and the next that is granted is %s: its holder would be refused', p.relation, v_max, v_last + 2);
                RETURN NEXT;
            END IF;
        EXCEPTION WHEN OTHERS THEN
            id := 'table-unreadable';
            finding := format('%s could not be looked at: %s', p.relation, SQLERRM);
            RETURN NEXT;
        END;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 6 $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION fence.repair(text), fence.source_findings() FROM PUBLIC;
SELECT fence.grant_allowed();

-- +goose Down
SELECT fence.refuse_down();
DROP FUNCTION fence.source_findings();
DROP FUNCTION fence.repair(text);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 5 $$;
-- +goose StatementEnd
