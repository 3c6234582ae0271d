-- What a run shows: on a terminal one line that is redrawn, elsewhere a plain line now and then. Rank 0 only. Speeds are
-- of the time since the last line shown.
local core = require "dtrain.core"
local util = require "dtrain.util"

local Progress = {}
Progress.__index = Progress

local M = {}

-- Whether standard output ends in a terminal. Open MPI gives each rank a pseudo-terminal of its own; what counts then
-- is where mpirun's output goes: to a file of the devpts file system, or not (Linux's /proc tells).
local function on_terminal()
  if not core.isatty(1) then return false end
  if not os.getenv "OMPI_COMM_WORLD_SIZE" then return true end
  local function read(path)
    local file <close> = io.open(path)
    return file and file:read("a") or ""
  end
  local parent = read("/proc/self/stat"):match("%) %a (%d+)")
  local mount = read("/proc/" .. (parent or "self") .. "/fdinfo/1"):match("mnt_id:%s*(%d+)")
  for line in read("/proc/self/mountinfo"):gmatch("[^\n]+") do
    if line:match("^%d+") == mount then return line:find(" - devpts ", 1, true) ~= nil end
  end
  return false
end

-- 12345 -> "12.3k"
local function short(n)
  for _, u in ipairs { { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } } do
    if n >= u[1] then return ("%.3g%s"):format(n / u[1], u[2]) end
  end
  return ("%.3g"):format(n)
end

local function pretty(x)
  if x == 0 then return "0" end
  if math.abs(x) >= 1e-3 and math.abs(x) < 1e4 then return ("%.4g"):format(x) end
  return ("%.2e"):format(x)
end

-- The next of 1, 2, 5, 10, 20, 50 ... at or above n.
local function round_up(n)
  local scale = 1
  while true do
    for _, m in ipairs { 1, 2, 5 } do
      if m * scale >= n then return m * scale end
    end
    scale = scale * 10
  end
end

-- Operations a second of this rank's threads on matrix products: the most that was measured, of which a step's share is shown.
local function peak()
  local most = 0
  for _, n in ipairs { 512, 1024 } do
    local x = core.rand({ n, n }, 1)
    for _ = 1, 3 do
      local begin = core.now()
      core.op("matmul", x, x)
      most = math.max(most, 2 * n ^ 3 / (core.now() - begin))
    end
  end
  return most
end

--- The progress of an engine's run; quiet and verbose as on the command line.
function M.new(engine)
  local options = engine.options
  local self = setmetatable({ engine = engine, on = core.rank() == 0, quiet = options.quiet,
    verbose = options.verbose }, Progress)
  if not self.on then return self end
  self.live = not self.quiet and not self.verbose and on_terminal()
  self.every = self.verbose and 1 or engine.job.log_every or round_up(engine.steps / 20)
  if not self.quiet then
    self.flops = engine.plan:flops() / engine.plan:rows() / engine.replicas -- this rank's part of a sample
    self.peak = engine.job.runs_on == "cpu" and peak() -- of a GPU nobody has measured one
  end
  self.begin = core.now()
  self.last_time, self.last_step = self.begin, engine.start
  self.done, self.rows = 0, 0
  return self
end

--- One line of text, above the redrawn one.
function Progress:say(fmt, ...)
  if not self.on or self.quiet then return end
  if self.shown then
    io.write("\r\27[K")
    self.shown = false
  end
  io.write(select("#", ...) > 0 and fmt:format(...) or fmt, "\n")
  io.flush()
end

--- After a step; m is what engine:step returned.
function Progress:step(m)
  if not self.on then return end
  local engine, now = self.engine, core.now()
  local step = engine.step_number
  local amount = engine.tokens and m.count or m.samples
  self.done, self.rows = self.done + amount, self.rows + m.samples
  if self.quiet then return end
  local last = step == engine.steps
  if self.live then
    if not last and now - self.last_time < 0.1 then return end
  elseif step % self.every ~= 0 and step ~= engine.start + 1 and not last then
    return
  end
  local elapsed, steps = math.max(now - self.last_time, 1e-9), step - self.last_step
  local rate = self.done / elapsed
  local pace = (now - self.begin) / (step - engine.start)
  local parts = { ("step %d/%d"):format(step, engine.steps), ("loss %.4f"):format(m.loss), "lr " .. pretty(m.lr) }
  if m.grad_norm and m.grad_norm >= 0 then parts[#parts + 1] = "norm " .. pretty(m.grad_norm) end
  if m.skipped then parts[#parts + 1] = ("skipped, scale %g"):format(m.loss_scale) end
  parts[#parts + 1] = short(rate) .. (engine.tokens and " tokens/s" or " samples/s")
  parts[#parts + 1] = ("%.3g ms"):format(elapsed / steps * 1e3)
  local speed = self.flops * self.rows / elapsed
  if self.peak then
    self.peak = math.max(self.peak, speed) -- steps may be faster than the products tried before (another dtype, a quieter machine)
    parts[#parts + 1] = ("%.0f %% of peak"):format(100 * speed / self.peak)
  end
  if not last then parts[#parts + 1] = "left " .. util.duration(pace * (engine.steps - step)) end
  local text = table.concat(parts, "  ")
  if self.live then
    local columns = core.columns()
    if #text >= columns then text = text:sub(1, columns - 1) end
    io.write("\r", text, "\27[K")
    io.flush()
    self.shown = true
  else
    self:say("%s", text)
  end
  self.last_time, self.last_step, self.done, self.rows = now, step, 0, 0
end

--- After an evaluation.
function Progress:eval(values, metrics)
  if not self.on then return end
  local parts = {}
  for _, metric in ipairs(metrics) do
    parts[#parts + 1] = ("%s %.4f"):format(metric.name, values[metric.name])
  end
  self:say("eval %d  %s", self.engine.step_number, table.concat(parts, "  "))
end

--- Ends the redrawn line.
function Progress:close()
  if not self.shown then return end
  io.write("\n")
  self.shown = false
end

return M
