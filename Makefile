.PHONY: test demo lint ci image build proof proof-long bench

test:
	go test -race ./...

demo:
	go run ./cmd/fencecheck demo

build:
	go build -o bin/ ./cmd/...

lint:
	scripts/lint

image:
	scripts/postgres-image

ci:
	bash .ci/run

# docs/proof.md; PROOF='-seed 42' repeats a run
proof:
	@go run ./integration/proof $(PROOF)

proof-long:
	@go run ./integration/proof -long -parts campaign,failover,patroni,hosts,controls $(PROOF)

# docs/speed.md; JSON=FILE keeps the results, WORK=Live measures only what has that in its name
bench:
	@cd integration/bench && go test -count=1 -timeout 20m -run '^TestBench$$' . -args -measure -json '$(if $(JSON),$(abspath $(JSON)))' -work '$(WORK)'
