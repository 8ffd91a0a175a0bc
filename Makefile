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
	@cd integration/bench && dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && go test -c -o "$$dir/bench" . && \
		"$$dir/bench" -test.run '^TestBench$$' -test.timeout 20m -measure -json '$(if $(JSON),$(abspath $(JSON)))' -work '$(WORK)'
