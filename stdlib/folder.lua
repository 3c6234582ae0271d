-- The folders that a run writes to: --out (metrics.jsonl) and the checkpoints'. A folder belongs to one run: it is locked while the
-- run lives, it keeps the run's id, and what another run has left in it is touched only when --overwrite says so: it is put aside,
-- and goes once this run's first checkpoint is safe. Rank 0 looks and
-- writes; what it finds, good or bad, all ranks are told. Whatever the run will write is tried before its first step.
local core = require "dtrain.core"
local util = require "dtrain.util"

local M = {}
local held = {} -- folders that this process holds: path -> hold, id of the run before

--- Calls f on rank 0; its result, a text, or its error is that of all ranks.
function M.at_root(f, ...)
  local ok, result = true, ""
  if core.rank() == 0 then ok, result = pcall(f, ...) end
  local told = core.tell((ok and "+" or "-") .. tostring(result or ""))
  if told:sub(1, 1) == "-" then error(told:sub(2), 0) end
  return told:sub(2)
end

-- One spelling of a path.
local function plain(path)
  path = path:gsub("/+", "/"):gsub("/%./", "/"):gsub("^%./", ""):gsub("/$", "")
  return path == "" and "." or path
end

local function hold(dir)
  dir = plain(dir)
  if not held[dir] then
    local h, before = core.hold(dir)
    held[dir] = { h, before }
  end
  return table.unpack(held[dir])
end

local function new_id() return os.date "!%Y%m%d-%H%M%S" .. ("-%06x"):format(math.floor(core.now() * 1e6) & 0xffffff) end

local function named(dir, step) return ("%s/step-%08d"):format(dir, step) end

local function list(steps)
  local out = {}
  for i = math.min(#steps, 4), 1, -1 do out[#out + 1] = ("%d"):format(steps[i]) end
  return (#steps > 4 and "... " or "") .. table.concat(out, ", ")
end

-- The checkpoints in dir; nothing else may have such a name.
local function steps_of(engine, dir)
  local steps, others = core.steps(dir)
  local one = others:match "[^\n]+"
  if one then util.fail_at(engine.job.where, "%s is no folder of a checkpoint but has the name of one; remove it", one) end
  return steps
end

-- What of an older run must go when this one may have the folder: steps, whether its metrics; an error when it may not.
local function older(engine, dir, steps, has_metrics, before)
  local o, who = engine.options, before and (" of run " .. before) or ""
  local resume, own = o.resume, engine.out and plain(engine.out)
  if resume == "auto" then return {}, false end
  if not resume then
    if (#steps > 0 or has_metrics) and not o.overwrite then
      local what = #steps > 0 and ("%s holds checkpoints%s (step %s)"):format(dir, who, list(steps))
        or ("%s/metrics.jsonl holds the metrics%s"):format(engine.out, who)
      util.fail_at(engine.job.where, "%s; go on with that run (--resume auto), give this one another folder (--out, or "
        .. "checkpoint.dir), or remove what is there (--overwrite)", what)
    end
    return steps, has_metrics
  end
  local from = plain(resume)
  if from == dir or from == own then return {}, false end
  local at = tonumber(from:match "/step%-(%d+)$")
  if at and from == plain(named(dir, at)) then
    local later = {}
    for _, step in ipairs(steps) do if step > at then later[#later + 1] = step end end
    if #later > 0 and not o.overwrite then
      util.fail_at(engine.job.where, "%s holds later checkpoints (step %s) than the one to go on from; go on from the newest "
        .. "(--resume auto), give this run another folder, or remove the later ones (--overwrite)", dir, list(later))
    end
    return later, false
  end
  if (#steps > 0 or has_metrics) and not o.overwrite then
    util.fail_at(engine.job.where, "%s holds the files%s, but --resume %s goes on from elsewhere; give this run another folder "
      .. "(--out, or checkpoint.dir), or remove what is there (--overwrite)", #steps > 0 and dir or engine.out, who, resume)
  end
  return steps, has_metrics
end

-- On rank 0: takes the folders, opens the metrics' file into engine.metrics; returns the run's id.
local function open(engine)
  local c, out = engine.checkpoint, engine.out
  local dir = c and plain(c.dir)
  local holds, before, steps, has_metrics = {}, nil, {}, false
  if dir then
    holds[1], before = hold(dir)
    steps = steps_of(engine, dir)
  end
  if out then
    local h, of = hold(out)
    holds[#holds + 1], before = h, before or of
    local lines, content = core.lines(out .. "/metrics.jsonl")
    engine.metrics, engine.metrics_before = lines, content
    has_metrics = content ~= ""
  end
  local gone, wipe = older(engine, dir, steps, has_metrics, before)
  if dir then core.try_folder(dir) end
  for _, step in ipairs(gone) do core.put_aside(dir, step) end
  if wipe then
    local kept, earlier = core.lines(core.put_aside(out) .. "/metrics.jsonl")
    if earlier == "" then kept:add(engine.metrics_before) end -- else this replaces a run that died before its first checkpoint
    local ok, message = kept:flush()
    if not ok then util.fail_at(engine.job.where, "%s", message) end
    kept:close()
    engine.metrics:cut(0)
    engine.metrics_before = ""
  end
  local mine = before and (#steps > #gone or has_metrics and not wipe) and before or new_id()
  for _, h in ipairs(holds) do h:name(mine) end
  return mine
end

--- Before an engine resumes: engine.run is its id; on rank 0 engine.metrics is its open file, engine.metrics_before what it holds.
function M.open(engine) engine.run = M.at_root(open, engine) end

--- Before a checkpoint goes into another folder than the job's.
function M.other(engine, dir)
  M.at_root(function()
    local h, before = hold(dir)
    local steps = steps_of(engine, dir)
    if #steps > 0 and before ~= engine.run and not engine.options.overwrite then
      util.fail("%s holds checkpoints%s (step %s); save into another folder, or remove what is there (--overwrite)", dir,
        before and (" of run " .. before) or "", list(steps))
    end
    if before ~= engine.run then for _, step in ipairs(steps) do core.put_aside(dir, step) end end
    h:name(engine.run)
    held[plain(dir)][2] = engine.run
  end)
end

--- After a checkpoint in dir is safe: what this run replaces goes.
function M.settle(engine, dir)
  M.at_root(function()
    core.settle(plain(dir))
    if engine.out then core.settle(plain(engine.out)) end
  end)
end

return M
