//go:build !linux

package leasedb

import "time"

func bootTime() time.Duration { return 0 }
