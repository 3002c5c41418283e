#!/bin/bash
# Becomes the first process of new namespaces, and then systemd: see lab.py.
# $1: where a Python lives, $2: where packages that cubroker needs are installed.
set -eu
PATH=$PATH:/usr/sbin:/sbin  # which `su` leaves out

mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys  # the settings of the host's kernel stay as they are
umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run

# What is written to these folders goes to memory, and is gone with the lab.
for folder in /etc /opt /usr/local; do
  mkdir -p "/run/lab$folder/upper" "/run/lab$folder/work"
  mount -t overlay -o "lowerdir=$folder,upperdir=/run/lab$folder/upper,workdir=/run/lab$folder/work" overlay "$folder"
done
mkdir -p /opt/python /opt/packages /opt/lib
mount --bind "$1" /opt/python  # a service sees neither /root nor /tmp
mount --bind "$2" /opt/packages
mount -o remount,bind,ro /opt/python
mount -o remount,bind,ro /opt/packages
find /opt/python/lib -maxdepth 1 -name 'libpython*.so*' -exec ln -s {} /opt/lib/ \;
echo /opt/lib > /etc/ld.so.conf.d/00-lab.conf  # before the one of another Python
ldconfig

# Of the host's units only those that every service wants.
rm -rf /etc/systemd/system /etc/systemd/journald.conf.d
mkdir -p /etc/systemd/system /etc/systemd/journald.conf.d /run/lab/units
echo lab > /etc/hostname
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\n' > /etc/systemd/journald.conf.d/lab.conf
for unit in basic.target final.target multi-user.target paths.target shutdown.target slices.target sockets.target \
  sysinit.target timers.target umount.target systemd-journald.service systemd-journald.socket; do
  cp "/usr/lib/systemd/system/$unit" /run/lab/units/
done
mkdir /run/lab/units/sysinit.target.wants /run/lab/generators
ln -s ../systemd-journald.service /run/lab/units/sysinit.target.wants/

ip link set lo up
hostname lab
exec env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 container=lab \
  SYSTEMD_UNIT_PATH=/run/lab/units:/etc/systemd/system:/run/systemd/system:/usr/local/lib/systemd/system \
  SYSTEMD_GENERATOR_PATH=/run/lab/generators \
  /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=no
