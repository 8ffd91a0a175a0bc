package fencedb

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// fuzzConn is one connection for all of a target's inputs.
func fuzzConn(f *testing.F) *pgx.Conn {
	f.Helper()
	cfg := pgtest.NewEmpty(f)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	return pgtest.Conn(f, cfg)
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// What is a name in SQL, and what is text, a comment or a quoted identifier, is as PostgreSQL reads it: an expression that is put
// together of parts, whose values are known, has their values once it has been through named and the server.
func FuzzNamedArguments(f *testing.F) {
	for _, seed := range [][3]string{
		{"abcdefghijkl", "x", "@fence"}, {"bab", "it's @a", `\`}, {"cac", `\'@a`, "'"}, {"dad", "$$ @a $", "$t$"}, {"eaea", "*/ @a /*", "@b"}, {"fafb", "' @a\r\n", "--"},
		{"gag", `"@a"`, "é"}, {"jaja", `\`, `C:\`}, {"kal", "@a$b", "::"}, {"aiba", "caf\xe9 ", "nul\x00"}, {"a", "@writegate_0", "@writegate_1"}, {"mamb", "@a", "E'"},
	} {
		f.Add(seed[0], seed[1], seed[2], uint8(len(seed[0])%3))
	}
	ctx := context.Background()
	conn := fuzzConn(f)
	f.Fuzz(func(t *testing.T, parts, one, other string, before uint8) {
		if len(parts) > 40 {
			parts = parts[:40]
		}
		before %= 4
		own, reserved := Args{}, Args{"fence": int64(42)}
		var sql, want strings.Builder
		sql.WriteString("''")
		add := func(s, value string) { sql.WriteString(" || " + s); want.WriteString(value) }
		for i, part := range []byte(parts) {
			text := one
			if i%2 == 1 {
				text = other
			}
			switch (part - 'a') % 13 {
			case 0:
				own["a"] = one
				add("@a::text", one)
			case 1:
				add("'"+strings.ReplaceAll(text, "'", "''")+"'", text)
			case 2:
				add("E'"+strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(text)+"'", text)
			case 3:
				for _, tag := range []string{"$$", "$t$", "$é_1$"} {
					if strings.Index(text+tag, tag) == len(text) {
						add(tag+text+tag, text)
					}
				}
			case 4:
				text = strings.NewReplacer("*", "", "/", "").Replace(text)
				add("/* "+text+" /* @fence '*/ "+text+" */ ''", "")
			case 5:
				text = strings.NewReplacer("\r", "", "\n", "").Replace(text)
				add("-- "+text+"\n ''", "")
			case 6:
				if len(text) > 0 && len(text) < 64 && !strings.ContainsRune(text, 0) {
					add(`(SELECT `+quote(text)+` FROM (SELECT 'i'::text AS `+quote(text)+`) q)`, "i")
				}
			case 7:
				add(`('{1,2}'::int[]@>'{1}')::text`, "true")
			case 8:
				add("@fence::bigint::text", "42")
			case 9:
				if len(text) < 64 {
					add("name'"+strings.ReplaceAll(text, "'", "''")+"'::text", text)
				}
			case 10:
				add(`(SELECT e$a$b FROM (SELECT 'd'::text AS e$a$b) q)`, "d")
			case 11:
				own["b_1"] = other
				add("(@b_1)::text", other)
			case 12:
				add("U&'"+strings.NewReplacer("'", "''", `\`, `\\`).Replace(text)+"'", text)
			}
		}
		text, args, err := named(int(before), sql.String(), own, reserved)
		if !isText(sql.String()) {
			require.Error(t, err, "what is no text is not sent, and nothing of it is left out")
			return
		}
		if strings.Contains(sql.String(), "@writegate_") {
			require.Error(t, err, "the gate's own names are not to be had")
			return
		}
		require.NoError(t, err, "%s", sql.String())
		// Those that the statement had before take their places.
		query, all := "SELECT ''", make([]any, before)
		for i := range all {
			all[i] = ""
			query += " || $" + string(rune('1'+i)) + "::text"
		}
		var got string
		if all = append(all, args...); !isText(one) && own["a"] != nil || !isText(other) && own["b_1"] != nil {
			return // not for the server, which says so
		}
		require.NoError(t, conn.QueryRow(ctx, query+" || "+text, all...).Scan(&got), "%s became %s", sql.String(), text)
		require.Equal(t, want.String(), got, "%s became %s", sql.String(), text)

		// An argument that is not used, and a name without an argument, are errors wherever they stand.
		_, _, err = named(int(before), sql.String(), merge([]Args{own, {"unused": 1}}), reserved)
		require.Error(t, err)
		_, _, err = named(int(before), sql.String()+" || @unknown", own, reserved)
		require.Error(t, err)
	})
}

// Text, names and arrays that become part of SQL, and keys as the audit has them, are to the server what they were to us.
func FuzzQuoting(f *testing.F) {
	for _, seed := range [][2]string{
		{"", "x"}, {"it's", `\`}, {`a"b`, `\'`}, {"NULL", `{"a",NULL}`}, {",", "{}"}, {"E'", "$$"}, {"日本", "\u202e\n"}, {"\x01\x7f", "tab\t"}, {"bad\xff", "nul\x00"},
		{strings.Repeat("n", 63), strings.Repeat(`\'"`, 500)}, {"\U0010ffff", "\ufeff\uffff"},
	} {
		f.Add(seed[0], seed[1])
	}
	ctx := context.Background()
	conn := fuzzConn(f)
	f.Fuzz(func(t *testing.T, one, other string) {
		key := Key{"id": one, "bytes": []byte(other), "in": map[string]any{"v": other}, "raw": json.RawMessage(other)}
		var found map[string]any
		require.NoError(t, json.Unmarshal([]byte(key.String()), &found), key.String())
		require.Len(t, found, len(key))
		require.Equal(t, storable(one), found["id"])
		var id string
		require.NoError(t, conn.QueryRow(ctx, `SELECT $1::text::jsonb ->> 'id'`, Key{"id": one, "n": 1}.String()).Scan(&id))
		require.Equal(t, storable(one), id)
		require.True(t, isText(storable(other)))
		if !isText(one) || !isText(other) {
			return
		}
		for _, standard := range []string{"on", "off"} {
			_, err := conn.Exec(ctx, "SET standard_conforming_strings = "+standard)
			require.NoError(t, err)
			var back [2]string
			require.NoError(t, conn.QueryRow(ctx, "SELECT "+literals([]string{one, other})).Scan(&back[0], &back[1]))
			require.Equal(t, [2]string{one, other}, back)
		}
		if one != "" && len(one) < 64 {
			described, err := conn.Prepare(ctx, "", "SELECT 1 AS "+quote(one))
			require.NoError(t, err)
			require.Equal(t, one, described.Fields[0].Name)
			var same bool
			require.NoError(t, conn.QueryRow(ctx, `SELECT parse_ident($1) = parse_ident(format('%I.%I', $2::text, 'x'))`, quote(one)+".x", one).Scan(&same))
			require.True(t, same)
		}
		var made textArray
		var err error
		for _, value := range []any{one, nil, other, ""} {
			err = errors.Join(err, made.add(pgtype.TextOID, value))
		}
		array := made.String()
		require.NoError(t, err)
		var list []*string
		require.NoError(t, conn.QueryRow(ctx, "SELECT $1::text::text[]", array).Scan(&list))
		require.Equal(t, []*string{&one, nil, &other, new(string)}, list)
	})
}

// What is asked for by name arrives in the fields that are called like it, each value in a field of its own, however columns
// and fields are spelt; or it is refused before anything is sent.
func FuzzReturning(f *testing.F) {
	for _, seed := range []string{"id", "id,user_id", "ID,UserID", "userid", "_user__id_,a_note", "id,ID", "note", "user_id,userid", "usérid", "İd", "K", "", "id,nothing", "at,id", "id,id"} {
		f.Add(seed, true)
		f.Add(seed, false)
	}
	type inner struct{ UserID string }
	type target struct {
		inner
		ID      string
		Note    string `db:"-"`
		Other   string `db:"a_note,omitempty"`
		private string
	}
	f.Fuzz(func(t *testing.T, list string, named bool) {
		columns := strings.Split(list, ",")
		table := &Table{name: "t", columns: map[string]column{}, names: columns}
		for _, c := range columns {
			table.columns[c] = column{Name: c}
		}
		var got target
		var o writeOptions
		if named {
			Returning(&got, columns...)(&o)
		} else {
			Returning(&got)(&o)
		}
		asked, err := o.into.of(table)
		if err != nil {
			return
		}
		require.Subset(t, columns, asked)
		if named {
			require.Equal(t, columns, asked)
		} else {
			require.Len(t, asked, 3, "each field has its column")
		}
		sent := make([]string, len(asked))
		err = o.into.read(row{names: asked, scan: func(dest ...any) error {
			for i, d := range dest {
				text, ok := d.(*string)
				if !ok {
					return errNoRow // a lone column that is no field of the struct
				}
				sent[i] = "value of " + strings.ToLower(strings.ReplaceAll(asked[i], "_", ""))
				*text = sent[i]
			}
			return nil
		}})
		if err != nil {
			require.True(t, named, "what was chosen by the fields can be read into them")
			return
		}
		var arrived []string
		for _, field := range [][2]string{{"userid", got.UserID}, {"id", got.ID}, {"anote", got.Other}} {
			if field[1] != "" {
				require.Equal(t, "value of "+field[0], field[1])
				arrived = append(arrived, field[1])
			}
		}
		require.ElementsMatch(t, sent, arrived)
		require.Empty(t, got.Note+got.private)
	})
}
