-- What orders the stages of a pipeline, whichever strategy gives it: which rank has which stage, and what each does in a step.
local core = require "dtrain.core"
local schedules = require "dtrain.strategy.schedules"
local util = require "dtrain.util"

local Order = { __name = "schedule" }
Order.__index = Order

local M = {}

local form = { { "place", "function" }, { "order", "callable", required = true }, { "chunks", "count" } }

--- Checks what a script or a strategy gives: the name of a schedule of the library, a function (the order of a schedule whose rank r
--- has stages r, r + ranks, ...), or { place =, order =, chunks = }. chunks: stages a rank, nil: the schedule's own number.
function M.new(given, chunks)
  local name, s = "of the script", { order = given }
  if type(given) == "string" then
    name, s = given, schedules[given]
    if not s then
      util.fail("dt.job: parallel: there is no schedule %q; %s", given, util.suggest(given, util.keys(schedules)))
    end
    if chunks and chunks > 1 and not s.chunks then
      util.fail("dt.job: parallel: chunks = %d, but the schedule %s has one chunk on each rank; take schedule = \"interleaved\"",
        chunks, given)
    end
  elseif type(given) == "table" and not util.callable(given) then
    s = util.options("dt.job: parallel: schedule", given, form)
  end
  local info = type(s.order) == "function" and debug.getinfo(s.order, "S")
  return setmetatable({ name = name, order = s.order, place = s.place, chunks = chunks or s.chunks or 1,
    where = name ~= given and info and info.short_src .. ":" .. info.linedefined or nil, known = {} }, Order)
end

--- Which of so many ranks has which stage: a core.stages.
function Order:map(ranks)
  local list = {}
  for stage = 0, ranks * self.chunks - 1 do
    local at = stage % ranks
    if self.place then at = self.place(stage, ranks, self.chunks) end
    list[stage + 1] = type(at) == "table" and at or { at }
  end
  return core.stages { ranks = ranks, list = list, where = self.where or util.where() }
end

--- The checked schedule of a step of so many microbatches: a core.schedule.
function Order:steps(ranks, micro)
  local key, where = ranks .. " " .. micro, self.where or util.where()
  if not self.known[key] then
    local actions = {}
    for rank = 0, ranks - 1 do
      actions[rank + 1] = self.order(rank, ranks, micro, self.chunks)
      if type(actions[rank + 1]) ~= "table" then
        util.fail_at(where, "schedule %s: for stage %d it returned %s; it must return a list of { \"F\" | \"B\" | \"W\", microbatch "
          .. "[, chunk] [, with = an action, or a list] }", self.name, rank, util.show(actions[rank + 1]))
      end
    end
    self.known[key] = core.schedule { place = self:map(ranks), micro = micro, name = self.name, where = where, actions = actions }
  end
  return self.known[key]
end

--- What graph:compile is told. micros: the numbers of microbatches that a step may have, nil: for evaluation. starts: where stages 1,
--- 2, ... begin (the verb cut), nil: balanced.
function Order:plan(ranks, micros, starts)
  if starts and #starts ~= ranks * self.chunks - 1 then
    util.fail("dt.job: parallel: cut says where %d stages begin, but there are %d; it names the beginnings of stages 1 to %d",
      #starts, ranks * self.chunks, ranks * self.chunks - 1)
  end
  return { place = self:map(ranks), where = util.where(),
    schedules = micros and util.map(micros, function(n) return self:steps(ranks, n) end),
    starts = starts and util.map(starts, function(s) return type(s) == "table" and s or { s } end) }
end

return M
