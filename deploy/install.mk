# `make install`: the units of deploy/systemd and what belongs to them, with the paths that were chosen; the page of the
# manual and the completion of shells, which deploy/generate.py writes.
# The program itself is wherever $(PREFIX)/bin/cubroker leads to.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=

SETTINGS := $(DESTDIR)$(SYSCONFDIR)/cubroker/cubroker.toml
INSTALLED := \
	systemd/cubroker.service:lib/systemd/system/cubroker.service \
	systemd/cubroker.socket:lib/systemd/system/cubroker.socket \
	systemd/cubroker-requests.socket:lib/systemd/system/cubroker-requests.socket \
	systemd/cubroker-load@.service:lib/systemd/system/cubroker-load@.service \
	systemd/cubroker-export.service:lib/systemd/system/cubroker-export.service \
	systemd/cubroker-fetch@.service:lib/systemd/system/cubroker-fetch@.service \
	systemd/user/cubroker.service:lib/systemd/user/cubroker.service \
	systemd/cubroker.sysusers:lib/sysusers.d/cubroker.conf \
	systemd/cubroker.tmpfiles:lib/tmpfiles.d/cubroker.conf \
	systemd/override.conf:share/doc/cubroker/override.conf \
	systemd/network.conf:share/doc/cubroker/network.conf \
	systemd/standby.conf:share/doc/cubroker/standby.conf \
	systemd/load.conf:share/doc/cubroker/load.conf \
	systemd/export.conf:share/doc/cubroker/export.conf \
	systemd/fetch.conf:share/doc/cubroker/fetch.conf \
	man/cubroker.1:share/man/man1/cubroker.1 \
	completion/cubroker.bash:share/bash-completion/completions/cubroker \
	completion/_cubroker:share/zsh/site-functions/_cubroker \
	completion/cubroker.fish:share/fish/vendor_completions.d/cubroker.fish

.PHONY: install uninstall

# Settings that are there already stay as they are.
install:
	@set -e; umask 022; for pair in $(INSTALLED); do \
		place="$(DESTDIR)$(PREFIX)/$${pair#*:}"; mkdir -p "$${place%/*}"; echo "$$place"; \
		sed -e 's|/usr/local/|$(PREFIX)/|' -e 's|/etc/cubroker/|$(SYSCONFDIR)/cubroker/|' \
			"deploy/$${pair%%:*}" > "$$place"; \
	done; \
	for folder in load fetch cluster; do mkdir -p "$(DESTDIR)$(SYSCONFDIR)/cubroker/$$folder"; done; \
	if [ -e "$(SETTINGS)" ]; then echo "$(SETTINGS) (kept)"; else echo "$(SETTINGS)"; cp deploy/cubroker.toml "$(SETTINGS)"; fi

# Settings that were changed, and descriptions of pools, are not ours to remove.
uninstall:
	@set -e; for pair in $(INSTALLED); do rm -f "$(DESTDIR)$(PREFIX)/$${pair#*:}"; done; \
	if cmp -s deploy/cubroker.toml "$(SETTINGS)"; then rm "$(SETTINGS)"; fi; \
	for folder in "$(DESTDIR)$(PREFIX)/share/doc/cubroker" "$(DESTDIR)$(SYSCONFDIR)/cubroker/load" \
		"$(DESTDIR)$(SYSCONFDIR)/cubroker/fetch" "$(DESTDIR)$(SYSCONFDIR)/cubroker/cluster" \
		"$(DESTDIR)$(SYSCONFDIR)/cubroker"; do \
		if [ -d "$$folder" ]; then rmdir --ignore-fail-on-non-empty "$$folder"; fi; \
	done
