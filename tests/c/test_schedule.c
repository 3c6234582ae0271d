/* The checker of pipeline schedules: what it accepts, what it finds out, and what it says about lists and maps that cannot be. */
#include "plan/schedule.h"
#include "t.h"

static dt_err e;

/* "F1 F2+B1 B2" for each rank; a letter after the number is the chunk, + joins what runs together */
static dt_schedule *placed(const dt_stages *map, int micros, const char *const *text) {
  dt_schedule *s = dt_schedule_new(map, micros);
  for (int r = 0; r < map->ranks; r++)
    for (const char *p = text[r]; *p;) {
      bool with = *p == '+';
      char kind = *(p += with), *end;
      int micro = (int)strtol(p + 1, &end, 10), chunk = *end >= 'a' && *end <= 'z' ? *end++ - 'a' : 0;
      dt_schedule_add(s, r, kind, chunk, micro - 1, with);
      for (p = end; *p == ' ';) p++;
    }
  return s;
}
static dt_schedule *of_map(int ranks, int ways, int n, const int *rank, int micros, const char *const *text) {
  dt_stages *map = NULL;
  T_CHECK(!dt_stages_new(ranks, ways, n, rank, "own.lua:7", &map, &e));
  dt_schedule *s = placed(map, micros, text);
  dt_stages_free(map);
  return s;
}
static dt_schedule *schedule(int ranks, int chunks, int micros, const char *const *text) {
  dt_stages *map = dt_stages_even(ranks, chunks);
  dt_schedule *s = placed(map, micros, text);
  dt_stages_free(map);
  return s;
}

static dt_status check(int ranks, int chunks, int micros, const char *const *text) {
  dt_schedule *s = schedule(ranks, chunks, micros, text);
  e = (dt_err){0};
  dt_status st = dt_schedule_check(s, "mine", "own.lua:7", &e);
  dt_schedule_free(s);
  return st;
}
#define CHECK(ranks, chunks, micros, ...) check(ranks, chunks, micros, (const char *const[]){__VA_ARGS__})

T_BEGIN
T_TEST ("1F1B on two stages: slots, ticks, flight") {
  dt_schedule *s = schedule(2, 1, 3, (const char *const[]){"F1 F2 B1 F3 B2 B3", "F1 B1 F2 B2 F3 B3"});
  T_CHECK(!dt_schedule_check(s, "1f1b", NULL, &e));
  T_CHECK(s->flight[0] == 2 && s->flight[1] == 1 && s->slots[0] == 2 && s->slots[1] == 1 && !s->split);
  T_CHECK(s->action[0][0].slot == 0 && s->action[0][1].slot == 1 && s->action[0][3].slot == 0);
  T_CHECK(s->action[0][2].first && !s->action[0][4].first && s->action[0][5].last);
  T_NEAR(dt_schedule_time(s, 1, 1, 0, NULL), 2 * (3 + 2 - 1), 0);
  T_NEAR(dt_schedule_time(s, 1, 1, 1, NULL), (3 + 1) * 3, 0);
  dt_schedule_free(s);
}
T_TEST ("weight gradients apart hold a slot until they are made") {
  dt_schedule *s = schedule(1, 1, 2, (const char *const[]){"F1 B1 F2 B2 W1 W2"});
  T_CHECK(!dt_schedule_check(s, "w", NULL, &e));
  T_CHECK(s->split && s->flight[0] == 2 && s->slots[0] == 2);
  dt_schedule_free(s);
}
T_TEST ("a lost microbatch") {
  T_CHECK(CHECK(2, 1, 2, "F1 F2 B1 B2", "F1 B1 F2") == DT_EUSER);
  T_CHECK(strstr(e.text, "schedule mine: stage 1 of 2 never runs B2") != NULL);
  T_STR(e.where, "own.lua:7");
}
T_TEST ("a microbatch twice") {
  T_CHECK(CHECK(1, 1, 2, "F1 F2 B1 B1") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 has B1 twice") != NULL);
}
T_TEST ("W of some microbatches only") {
  T_CHECK(CHECK(1, 1, 2, "F1 F2 B1 B2 W1") == DT_EUSER);
  T_CHECK(strstr(e.text, "never runs W2") != NULL);
}
T_TEST ("a backward before its forward") {
  T_CHECK(CHECK(1, 1, 1, "B1 F1") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 has B1 before F1") != NULL);
}
T_TEST ("stages that wait in a circle") {
  T_CHECK(CHECK(2, 1, 2, "F1 B1 F2 B2", "F1 F2 B1 B2") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 waits in B1 for B1 of stage 1") &&
          strstr(e.text, "stage 1 waits in F2 for F2 of stage 0"));
}
T_TEST ("chunks: stage 2 is chunk b of rank 0") {
  T_CHECK(CHECK(2, 2, 2, "F1a F2a F1b F2b B1b B2b B1a B2a", "F1a F2a F1b F2b B1b B2b B1a B2a") == DT_OK);
  T_CHECK(CHECK(2, 2, 1, "F1b F1a B1b B1a", "F1a F1b B1b B1a") == DT_EUSER);
  T_CHECK(strstr(e.text, "chunk 2") != NULL);
}
T_TEST ("a receiver in another order needs deeper rings") {
  dt_schedule *s = schedule(
      2, 1, 6, (const char *const[]){"F1 F2 F3 F4 F5 F6 B6 B5 B4 B3 B2 B1", "F6 F5 F4 F3 F2 F1 B6 B5 B4 B3 B2 B1"});
  const dt_link l[2] = {{0, 1}, {1, 0}};
  T_CHECK(!dt_schedule_check(s, "reverse", NULL, &e));
  int depth[2] = {0, 0};
  dt_schedule_depths(s, l, 2, depth);
  T_CHECK(depth[0] == 6 && depth[1] == 2); /* F6 is sent last and taken first */
  dt_schedule_free(s);
  s = schedule(2, 1, 6,
               (const char *const[]){"F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6", "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6"});
  depth[0] = depth[1] = 0;
  T_CHECK(!dt_schedule_check(s, "1f1b", NULL, &e));
  dt_schedule_depths(s, l, 2, depth);
  T_CHECK(depth[0] == 2 && depth[1] == 2);
  dt_schedule_free(s);
}
static const int v[4] = {0, 1, 1, 0};
T_TEST ("a map: the ranks' stages in the shape of a V") {
  dt_schedule *s = of_map(2, 1, 4, v, 2,
                          (const char *const[]){"F1a F2a F1b B1b F2b B2b B1a B2a", "F1a F1b F2a F2b B1b B1a B2b B2a"});
  T_CHECK(!dt_schedule_check(s, "v", NULL, &e));
  T_CHECK(s->map->chunk[2] == 1 && dt_stages_of(s->map, 0, 1) == 3 && s->map->rank[3] == 0);
  T_CHECK(s->flight[0] == 3 && s->flight[1] == 4);
  int depth[3] = {0, 0, 0};
  const dt_link l[3] = {{1, 2}, {0, 1}, {2, 1}}; /* the first and the last between stages of rank 1 */
  dt_schedule_depths(s, l, 3, depth);
  T_CHECK(depth[0] == 1 && depth[1] == 2 && depth[2] == 1);
  dt_schedule_free(s);
  s = of_map(2, 1, 4, v, 1, (const char *const[]){"F1b F1a B1b B1a", "F1a F1b B1b B1a"});
  e = (dt_err){0};
  T_CHECK(dt_schedule_check(s, "v", NULL, &e) == DT_EUSER);
  T_CHECK(strstr(e.text, "rank 0 of the pipeline waits in F1 of chunk 2 for F1 of chunk 2 of rank 1") != NULL);
  dt_schedule_free(s);
}
T_TEST ("maps that cannot be") {
  static const struct {
    int ways, n, rank[4];
    const char *says;
  } bad[] = {{1, 2, {0, 2}, "stage 1 on rank 2 of the pipeline; 0 to 1 are there"},
             {1, 2, {0, -1}, "stage 1 on rank -1"},
             {1, 3, {0, 0, 0}, "rank 1 of the pipeline no stage"},
             {2, 2, {0, 1, 0, 1}, "rank 1 of the pipeline the last stage twice"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    dt_stages *map = NULL;
    e = (dt_err){0};
    T_CHECK(dt_stages_new(2, bad[i].ways, bad[i].n, bad[i].rank, "own.lua:7", &map, &e) == DT_EUSER && !map);
    T_CHECK(strstr(e.text, bad[i].says) != NULL);
    T_STR(e.where, "own.lua:7");
  }
}
static const int both[4] = {0, 1, 1, 0}; /* two copies of two stages */
T_TEST ("two ways: a microbatch goes one of them, through one copy of each stage") {
  dt_schedule *s = of_map(2, 2, 2, both, 2, (const char *const[]){"F1a F2b B2b B1a", "F2b F1a B1a B2b"});
  T_CHECK(!dt_schedule_check(s, "both", NULL, &e));
  T_NEAR(dt_schedule_time(s, 1, 1, 0, NULL), 4, 0); /* from both ends at once: no bubble */
  T_CHECK(s->flight[0] == 2 && s->slots[0] == 1 && s->slots[1] == 1);
  dt_schedule_free(s);
  s = of_map(2, 2, 2, both, 2, (const char *const[]){"F1a F2b F1b B1b B2b B1a", "F2b F1a B1a B2b"});
  e = (dt_err){0};
  T_CHECK(dt_schedule_check(s, "both", NULL, &e) == DT_EUSER && strstr(e.text, "microbatch 1 goes two ways") != NULL);
  dt_schedule_free(s);
  s = of_map(2, 2, 2, both, 2, (const char *const[]){"F1a B1a", "F2b F1a B1a B2b"});
  e = (dt_err){0};
  T_CHECK(dt_schedule_check(s, "both", NULL, &e) == DT_EUSER);
  T_CHECK(strstr(e.text, "rank 0 of the pipeline never runs F2 of chunk 2") && strstr(e.text, "on its way"));
  dt_schedule_free(s);
}
T_TEST ("actions that run together begin when all of them can, and hold their slots until all are over") {
  dt_schedule *s = schedule(2, 1, 2, (const char *const[]){"F1 F2+B1 B2", "F1 B1 F2 B2"});
  double *start[2], of[2][4];
  start[0] = of[0], start[1] = of[1];
  T_CHECK(!dt_schedule_check(s, "fused", NULL, &e) && s->fused);
  T_NEAR(dt_schedule_time(s, 1, 1, 0, start), 8, 0);
  T_NEAR(start[0][1], 3, 0); /* F2 waits for the other rank's B1 */
  T_NEAR(start[0][2], 3, 0);
  T_CHECK(s->slots[0] == 2 && s->action[0][1].slot == 1);
  dt_schedule_free(s);
  s = schedule(1, 1, 2, (const char *const[]){"F1 B1+W1+F2 B2+W2"}); /* F2 may not have the slot of B1 */
  T_CHECK(!dt_schedule_check(s, "fused", NULL, &e) && s->slots[0] == 2);
  dt_schedule_free(s);
  e = (dt_err){0};
  T_CHECK(CHECK(2, 1, 2, "F1+B1 F2 B2", "F1 B1 F2 B2") == DT_EUSER);
  T_CHECK(strstr(e.text, "stage 0 runs B1 together with F1, which it needs") != NULL);
}
T_END
