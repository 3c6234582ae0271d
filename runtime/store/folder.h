/* Floor 7: folders that runs write to. A folder belongs to one run at a time, and nothing outside it is ever touched: no symbolic link in it is
 * followed, no pipe is waited for, and what dtrain did not write stays. */
#ifndef DT_FOLDER_H
#define DT_FOLDER_H
#include "../base/file.h"

/* ---- a run's hold on a folder: the file run.json in it, locked ---- */
typedef struct dt_hold {
  int fd; /* -1: none */
  char *dir;
  char run[40]; /* id of the run that had the folder before, empty: none */
  struct pulse
      *pulse; /* where the file system has no locks: counts in run.json while this process lives; NULL: it is locked */
} dt_hold;
/* Makes the folder and takes it for this process; the hold of a process that is dead does not count. Waits for two seconds for one that is just
 * ending; without locks, for a minute for the count of one on another host. An error names the run that has it, its process and host. */
dt_status dt_hold_take(dt_hold *h, const char *dir, dt_err *e);
dt_status dt_hold_name(dt_hold *h, const char *run, dt_err *e); /* the folder is this run's from now on */
void dt_hold_drop(dt_hold *h);                                  /* also of a zeroed one */

/* ---- checkpoints in a folder ---- */
typedef DT_VEC(int64_t) dt_steps;
void dt_step_name(char buf[32], int64_t step); /* step-00000500 */
/* The steps that dir has checkpoints of, newest first. A missing folder has none. Anything else that has such a name goes into `others`, one a
 * line (may be NULL). */
dt_status dt_folder_steps(const char *dir, dt_steps *out, dt_str *others, dt_err *e);
/* Removes what an interrupted write left. */
dt_status dt_folder_tidy(const char *dir, dt_err *e);
/* Removes dir/name: the files that a checkpoint has, then the folder. When it holds anything else it stays as it is and *stays is set. */
dt_status dt_folder_remove(const char *dir, const char *name, bool *stays, dt_err *e);
/* Removes all but the `keep` newest checkpoints; that of `always` stays beside them. What cannot go is named in a warning. */
dt_status dt_folder_prune(const char *dir, int keep, int64_t always, dt_err *e);
/* What a new run replaces lies aside, in dir/replaced, until that run has a checkpoint. Makes the folder. */
dt_status dt_folder_aside(const char *dir, dt_err *e);
dt_status dt_folder_replace(const char *dir, int64_t step, dt_err *e); /* puts this checkpoint there */
dt_status dt_folder_settle(const char *dir, dt_err *e); /* removes what lies there; what dtrain did not write stays */
/* Whether a checkpoint can be written there: makes and removes one's folder with a file of a few bytes. */
dt_status dt_folder_try(const char *dir, dt_err *e);

/* ---- files in it ---- */
/* Opens a plain file of its own (no link to elsewhere, no second name, no pipe) with these flags; made when O_CREAT says so. */
dt_status dt_own_open(const char *path, int flags, int *fd, dt_err *e);
dt_status dt_fd_write(int fd, const char *path, const void *p, size_t n, int64_t at,
                      dt_err *e);                                                         /* all of it, at this byte */
dt_status dt_fd_read(int fd, const char *path, void *p, size_t n, int64_t at, dt_err *e); /* all of it, or an error */
dt_status dt_fd_hash(int fd, const char *path, int64_t at, int64_t n, uint64_t *hash, dt_err *e);
#endif
