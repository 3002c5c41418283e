# `make install`: the units of deploy/systemd and what belongs to them, with the paths that were chosen.
# The program itself is wherever $(PREFIX)/bin/cubroker leads to.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=

SETTINGS := $(DESTDIR)$(SYSCONFDIR)/cubroker/cubroker.toml
INSTALLED := \
	cubroker.service:lib/systemd/system/cubroker.service \
	cubroker.socket:lib/systemd/system/cubroker.socket \
	cubroker-requests.socket:lib/systemd/system/cubroker-requests.socket \
	cubroker-load@.service:lib/systemd/system/cubroker-load@.service \
	user/cubroker.service:lib/systemd/user/cubroker.service \
	cubroker.sysusers:lib/sysusers.d/cubroker.conf \
	cubroker.tmpfiles:lib/tmpfiles.d/cubroker.conf \
	override.conf:share/doc/cubroker/override.conf \
	network.conf:share/doc/cubroker/network.conf \
	load.conf:share/doc/cubroker/load.conf

.PHONY: install uninstall

# Settings that are there already stay as they are.
install:
	@set -e; umask 022; for pair in $(INSTALLED); do \
		place="$(DESTDIR)$(PREFIX)/$${pair#*:}"; mkdir -p "$${place%/*}"; echo "$$place"; \
		sed -e 's|/usr/local/|$(PREFIX)/|' -e 's|/etc/cubroker/|$(SYSCONFDIR)/cubroker/|' \
			"deploy/systemd/$${pair%%:*}" > "$$place"; \
	done; \
	mkdir -p "$(DESTDIR)$(SYSCONFDIR)/cubroker/load"; \
	if [ -e "$(SETTINGS)" ]; then echo "$(SETTINGS) (kept)"; else echo "$(SETTINGS)"; cp deploy/cubroker.toml "$(SETTINGS)"; fi

# Settings that were changed, and descriptions of pools, are not ours to remove.
uninstall:
	@set -e; for pair in $(INSTALLED); do rm -f "$(DESTDIR)$(PREFIX)/$${pair#*:}"; done; \
	if cmp -s deploy/cubroker.toml "$(SETTINGS)"; then rm "$(SETTINGS)"; fi; \
	for folder in "$(DESTDIR)$(PREFIX)/share/doc/cubroker" "$(DESTDIR)$(SYSCONFDIR)/cubroker/load" \
		"$(DESTDIR)$(SYSCONFDIR)/cubroker"; do \
		if [ -d "$$folder" ]; then rmdir --ignore-fail-on-non-empty "$$folder"; fi; \
	done
