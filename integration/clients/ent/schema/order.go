// Package schema describes app.orders to ent.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/dialect/entsql"
	"entgo.io/ent/schema"
	"entgo.io/ent/schema/field"
)

// Order is one row of app.orders. The fence column is not among its fields: the guard stamps it.
type Order struct{ ent.Schema }

// Annotations names the table.
func (Order) Annotations() []schema.Annotation {
	return []schema.Annotation{entsql.Annotation{Table: "orders"}}
}

// Fields are the columns that ent writes.
func (Order) Fields() []ent.Field {
	return []ent.Field{field.Int("id"), field.String("v")}
}
